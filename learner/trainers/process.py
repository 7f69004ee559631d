"""One rank of `rollmesh sft`, `rollmesh rm` or `rollmesh dpo`, from its files to the folder that it leaves.

Invariants: a run continues in its folder from its last checkpoint, with the same data in the same order. The folders
in `hf` are whole or are not there. SIGTERM ends the run after the present step, with a checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from rollmesh.learner.builders import watch_ranks
from rollmesh.learner.callbacks.interface import NO_CALLBACKS, EventSink
from rollmesh.learner.checkpoint.hf_folders import FOLDER
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME, list_checkpoints
from rollmesh.learner.checkpoint.retention import sweep
from rollmesh.learner.checkpoint.store import CheckpointStore, load_checkpoint
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.engine_specs import compute_deterministically, engine_spec
from rollmesh.learner.engines.interface import ACTOR, STATE_NAME, Engine
from rollmesh.learner.engines.megatron.environment import prepare_environment
from rollmesh.learner.engines.registry import create_engine
from rollmesh.learner.engines.tensors.hf_folder import write_adapter
from rollmesh.learner.liveness.start_notice import note_every_minute
from rollmesh.learner.model_files.location import context_length, resolve_model
from rollmesh.learner.recovery.run_identity import CONFIG
from rollmesh.learner.start_requirements import check_schedule
from rollmesh.learner.trainers.best import BestByMetric
from rollmesh.learner.trainers.checkpoints import Checkpoints
from rollmesh.learner.trainers.example_loader import ExampleLoader
from rollmesh.learner.trainers.identity import (
    COMMAND,
    KEY,
    check_identity,
    digest_of,
    held_out_identity,
    identity_of,
    measured_by,
)
from rollmesh.learner.trainers.loop import LoopRules, TrainingLoop
from rollmesh.learner.trainers.objectives import build_objective
from rollmesh.learner.trainers.records import Records
from rollmesh.learner.trainers.rows import held_out_rows, training_rows
from rollmesh.mesh.config import save_config
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.trainers.configs import TrainerConfig
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.files import write_atomically
from rollmesh.mesh.runtime.memory_tuning import freeze_heap
from rollmesh.mesh.runtime.ranks import check_ranks, choose_interface
from rollmesh.mesh.runtime.threads import available_cores
from rollmesh.mesh.tokenizer_files import load_tokenizer

log = logging.getLogger(__name__)
BEST = "best"
ADAPTER = "-adapter"
"""End of the name of a folder with the adapter alone, next to that of the model into which it is merged."""


def train_rank(command: str, config: TrainerConfig, controls: ControlRequests) -> bool:
    """Trains to the end; collective over the ranks. False: interrupted before.

    Args:
        command: `sft`, `rm` or `dpo`.
        config: of the run.
        controls: of rank 0, which asks it to end after the present step.

    Raises:
        CallbackError: a callback has ended the training.
        ConfigError: a setting that cannot be; a run that was begun with something else.
        DataError: a model, a file or a row that cannot be used.
        DivergedError: gradients stay infinite.
        RankLostError: another rank is lost.
    """
    check_ranks(SecuritySection(allow_insecure=config.security.allow_insecure))
    choose_interface(config.learner.distributed.interface)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    if config.learner.deterministic:
        compute_deterministically()
    if config.learner.engine == "megatron":
        prepare_environment()
    limit_s = config.learner.distributed.timeout_s
    with ExitStack() as closers:
        watch = closers.enter_context(watch_ranks(config.run.folder, limit_s, limit_s))
        with watch.phase("train"):
            return _Training(command, config, controls, closers).run()


class _Training:
    """The parts of one rank."""

    def __init__(self, command: str, config: TrainerConfig, controls: ControlRequests, closers: ExitStack) -> None:
        self._command, self._controls, self._closers = command, controls, closers
        with note_every_minute("fetches the model"):
            model = resolve_model(config.model)
        # No longer sequences than the model knows.
        longest = min(config.data.max_tokens, context_length(Path(model.path)) or config.data.max_tokens)
        data = config.data.model_copy(update={"max_tokens": longest})
        self._given = config
        self._config = config = config.model_copy(update={"model": model, "data": data})
        self._folder = config.run.folder
        tokenizer = load_tokenizer(Path(model.path))
        self._objective = build_objective(config, ChatEncoder(tokenizer, data.chat_template_kwargs))
        epochs = data.epochs or (None if config.learner.steps else 1)
        self._train = training_rows(data, self._objective.form, seed=config.run.seed, epochs=epochs)
        self._held_out = held_out_rows(data, self._objective.form, config.eval.rows)
        by_epochs = self._train.steps(config.learner.batch.rows)
        self._steps = min(steps for steps in (config.learner.steps, by_epochs) if steps is not None)
        check_schedule("learner.optimizer", config.learner.optimizer, self._steps)

    def run(self) -> bool:
        """See `train_rank`."""
        engine = self._open_engine()
        loader = ExampleLoader(engine.world)
        self._closers.callback(loader.close)
        leads = engine.layout.leads
        records = Records(self._config, self._controls, self._steps) if leads else None
        try:
            start, checkpoints = self._continue(engine, loader, records.callbacks if records else NO_CALLBACKS)
            complete = self._loop(engine, loader, start, checkpoints, records)
            if complete:
                self._export(engine, checkpoints)
        except BaseException as error:
            if records is not None:
                records.close("error", str(error))
            raise
        if records is not None:
            records.close("steps" if self._controls.stop_reason is None else self._controls.stop_reason)
        if leads and not complete:
            log.info("ended early with a checkpoint: the same command continues the run")
        return complete

    def _loop(
        self, engine: Engine, loader: ExampleLoader, start: int, checkpoints: Checkpoints, records: Records | None
    ) -> bool:
        """Trains the steps that are left."""
        config = self._config
        if records is not None:
            records.begin(checkpoints.incarnation, start)
            if start < self._steps:
                log.info("%s: steps %d to %d, %d rows", self._command, start + 1, self._steps, len(self._train.source))
        rules = LoopRules(
            self._steps,
            config.learner.batch.rows,
            config.learner.batch.tokens_per_micro_batch,
            config.learner.max_skipped,
            config.eval.every_steps,
        )
        loop = TrainingLoop(
            engine,
            self._objective.loss,
            loader,
            self._train,
            rules,
            records.log if records is not None else _unheard,
            held_out=self._held_out,
            checkpoints=checkpoints,
            controls=self._controls,
        )
        freeze_heap()
        return loop.run(start)

    def _open_engine(self) -> Engine:
        config = self._config
        spec = engine_spec(
            config.learner,
            config.model,
            config.learner.optimizer,
            total_steps=self._steps,
            seed=config.run.seed,
            longest=config.data.max_tokens,
            parallel=config.learner.parallel,
            lora=config.learner.lora,
            frozen=tuple(config.learner.frozen),
            router=config.learner.router,
            head_bias=False,
        )
        with note_every_minute("loads and checks the model"):
            engine = create_engine(spec, model_type=self._objective.model_type, backend=config.learner.engine)
            self._closers.callback(engine.close)
            evidence = engine.probe()
        if engine.layout.leads:
            log.info("%s, packing %s; %s", config.learner.engine, engine.packing.value, evidence)
        return engine

    def _continue(self, engine: Engine, loader: ExampleLoader, events: EventSink) -> tuple[int, Checkpoints]:
        """Prepares the objective and loads the last checkpoint; gives the steps that are done. Collective."""
        config, root = self._config, self._folder / CHECKPOINTS_NAME
        world, leads = engine.world, engine.layout.leads
        store = CheckpointStore(root)
        self._closers.callback(store.close)
        store.check(engine)
        identity = identity_of(self._command, config) if leads else {}
        there = list_checkpoints(root)[-1:] if leads else []
        # Nodes may have cached different answers: rank 0's counts.
        message = json.dumps([identity, *((path.name, version.incarnation) for version, path in there)]).encode()
        (found,) = filter(None, world.gather_bytes(message if leads else b""))
        identity, *last = json.loads(found)
        if last:
            check_identity(self._folder, _said_by(root / last[0][0]).get(KEY), identity)
        self._prepare(engine, loader, identity)
        start, incarnation = 0, 1
        if last:
            name, incarnation = last[0][0], last[0][1] + 1
            start = int(str(load_checkpoint({ACTOR: engine}, root / name)["step"]))
        best = None
        if leads:
            save_config(self._given, self._folder / CONFIG)
            write_atomically(self._folder / COMMAND, f"{self._command}\n")
            sweep(root, incarnation)
            if last:
                log.info("continues after step %d, from %s", start, last[0][0])
            if config.checkpoint.best and self._held_out:
                best = BestByMetric(root, incarnation, config.eval, measured_by(config))
        checkpoints = Checkpoints(
            store,
            root,
            incarnation,
            {KEY: identity},
            config.checkpoint,
            best=best,
            controls=self._controls,
            events=events,
        )
        return start, checkpoints

    def _prepare(self, engine: Engine, loader: ExampleLoader, identity: Mapping[str, str]) -> None:
        """Has the objective prepare the rows that will be used."""
        rows, objective = self._config.learner.batch.rows, self._objective
        cache = self._folder / f"prepared-{digest_of(identity)}.npy"
        self._train = objective.prepare(engine, loader, self._train, self._steps, cache)
        held_out = digest_of(held_out_identity(identity, self._config)) if self._held_out else ""
        for number, (label, own) in enumerate(self._held_out.items()):
            cache = self._folder / f"prepared-{held_out}-{number}.npy"
            self._held_out[label] = objective.prepare(engine, loader, own, own.steps(rows) or 0, cache)

    def _export(self, engine: Engine, checkpoints: Checkpoints) -> None:
        """Leaves the folders of `checkpoint.hf`, the best one last: its weights take the place of the trained ones."""
        lora, model = self._config.learner.lora, self._config.model
        for which in sorted(self._config.checkpoint.hf, reverse=True):
            if which == BEST:
                name = b"".join(engine.world.gather_bytes(checkpoints.best_name().encode())).decode()
                if not name:
                    log.warning("no checkpoint is the best, so %s is not written: see eval.metric", which)
                    continue
                load_checkpoint({ACTOR: engine}, self._folder / CHECKPOINTS_NAME / name)
            self._leave(engine, which, self._objective.export)
            if lora is not None:
                self._leave(engine, which + ADAPTER, lambda of, folder: write_adapter(of, model, lora, folder))

    def _leave(self, engine: Engine, name: str, export: Callable[[Engine, Path], None]) -> None:
        """Writes the present weights as a folder, in place of that of an earlier end of the run; collective."""
        out = self._folder / FOLDER / name
        unfinished = out.with_name(f".partial-{name}")
        if engine.layout.leads:
            shutil.rmtree(unfinished, ignore_errors=True)
        export(engine, unfinished)
        if engine.layout.leads:
            try:
                shutil.rmtree(out, ignore_errors=True)
                unfinished.rename(out)
            except OSError as error:
                raise DataError(f"cannot write {out}: {error.strerror or error}", hint="free space there") from error
            log.info("%s has the trained %s", out, "adapter" if name.endswith(ADAPTER) else "model")


def _unheard(_step: int, _record: Mapping[str, Any]) -> None:
    """Rank 0 alone writes records."""


def _said_by(checkpoint: Path) -> dict[str, Any]:
    """The caller's part of a checkpoint's state."""
    try:
        state: dict[str, Any] = json.loads((checkpoint / STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"checkpoint {checkpoint} cannot be read: {error}", hint="start over with --fresh") from error
    extra = state.get("extra")
    return extra if isinstance(extra, dict) else state
