"""One rank of `rollmesh sft`, `rollmesh rm` or `rollmesh dpo`, from its files to the folder that it leaves.

Invariants: a run continues in its folder from its last checkpoint, with the same data in the same order. The folders
`hf/last` and `hf/adapter` are whole or are not there. SIGTERM ends the run after the present step, with a checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from rollmesh.learner.builders import watch_ranks
from rollmesh.learner.checkpoint.hf_folders import FOLDER
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME, list_checkpoints
from rollmesh.learner.checkpoint.retention import sweep
from rollmesh.learner.checkpoint.store import CheckpointStore, load_checkpoint
from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.data.records import open_records
from rollmesh.learner.engine_specs import compute_deterministically, engine_spec
from rollmesh.learner.engines.interface import ACTOR, STATE_NAME, Engine
from rollmesh.learner.engines.megatron.environment import prepare_environment
from rollmesh.learner.engines.registry import create_engine
from rollmesh.learner.engines.tensors.hf_folder import write_adapter
from rollmesh.learner.liveness.start_notice import note_every_minute
from rollmesh.learner.metrics import MetricsWriter, open_trackers
from rollmesh.learner.model_files.location import context_length, resolve_model
from rollmesh.learner.recovery.run_identity import CONFIG, fingerprint
from rollmesh.learner.start_requirements import check_schedule
from rollmesh.learner.trainers.checkpoints import Checkpoints
from rollmesh.learner.trainers.example_loader import ExampleLoader
from rollmesh.learner.trainers.identity import KEY, check_identity, digest_of, identity_of
from rollmesh.learner.trainers.loop import LoopRules, TrainingLoop
from rollmesh.learner.trainers.objectives import build_objective
from rollmesh.learner.trainers.rows import FirstRows, Rows, rows_of
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
LAST, ADAPTER = "last", "adapter"
"""Folders of the trained model, with its adapter merged in, and of the adapter alone."""
RESULT = "trained.json"
"""File with the metrics of the last step, in the folder of a complete run."""


def train_rank(command: str, config: TrainerConfig, stop_asked: Callable[[], bool]) -> bool:
    """Trains to the end; collective over the ranks. False: asked to end before.

    Args:
        command: `sft`, `rm` or `dpo`.
        config: of the run.
        stop_asked: rank 0 is asked to end after the present step.

    Raises:
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
            return _Training(command, config, closers).run(stop_asked)


class _Training:
    """The parts of one rank."""

    def __init__(self, command: str, config: TrainerConfig, closers: ExitStack) -> None:
        self._command, self._closers = command, closers
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
        source = self._objective.source(open_records(data.train, "data.train"))
        self._train = rows_of(source, seed=config.run.seed, shuffle=data.shuffle, epochs=epochs)
        self._held_out: Rows | None = None
        if data.eval is not None:
            held_out = self._objective.source(open_records(data.eval, "data.eval"))
            self._held_out = rows_of(FirstRows(held_out, config.eval.rows), epochs=1)
        by_epochs = None if epochs is None else -(-len(source) * epochs // config.learner.batch.rows)
        self._steps = min(steps for steps in (config.learner.steps, by_epochs) if steps is not None)
        check_schedule("learner.optimizer", config.learner.optimizer, self._steps)

    def run(self, stop_asked: Callable[[], bool]) -> bool:
        """See `train_rank`."""
        engine = self._open_engine()
        loader = ExampleLoader(engine.world)
        self._closers.callback(loader.close)
        start, checkpoints = self._continue(engine, loader)
        leads = engine.layout.leads
        writer = MetricsWriter(open_trackers(self._config)) if leads else None
        last: dict[str, Any] = {}

        def report(step: int, record: Mapping[str, Any]) -> None:
            last.update(record)
            if writer is not None:
                writer.log(step, {**record, "steps": self._steps})

        if leads and start < self._steps:
            log.info("%s: steps %d to %d, %d rows", self._command, start + 1, self._steps, len(self._train.source))
        batch = self._config.learner.batch
        rules = LoopRules(
            self._steps,
            batch.rows,
            batch.tokens_per_micro_batch,
            self._config.learner.max_skipped,
            self._config.eval.every_steps,
        )
        loop = TrainingLoop(
            engine,
            self._objective.loss,
            loader,
            self._train,
            rules,
            report,
            held_out=self._held_out,
            checkpoints=checkpoints,
            stop_asked=stop_asked,
        )
        freeze_heap()
        try:
            complete = loop.run(start)
        finally:
            if writer is not None:
                writer.close()
        if complete:
            self._export(engine, last)
        elif leads:
            log.info("ended early with a checkpoint: the same command continues the run")
        return complete

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

    def _continue(self, engine: Engine, loader: ExampleLoader) -> tuple[int, Checkpoints]:
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
        if leads:
            save_config(self._given, self._folder / CONFIG)
            sweep(root, incarnation)
            if last:
                log.info("continues after step %d, from %s", start, last[0][0])
        return start, Checkpoints(store, root, incarnation, {KEY: identity}, config.checkpoint)

    def _prepare(self, engine: Engine, loader: ExampleLoader, identity: Mapping[str, str]) -> None:
        """Has the objective prepare the rows that will be used."""
        train, held_out, path = self._train, self._held_out, self._config.data.eval
        used = train.used(self._steps, self._config.learner.batch.rows)
        cache = self._folder / f"prepared-{digest_of(identity)}.npy"
        self._train = Rows(self._objective.prepare(engine, loader, train.source, used, cache), train.order)
        if held_out is not None and path is not None:
            rows = range(len(held_out.source))
            cache = self._folder / f"prepared-{digest_of({**identity, 'data.eval': fingerprint([path])})}.npy"
            self._held_out = Rows(self._objective.prepare(engine, loader, held_out.source, rows, cache), held_out.order)

    def _export(self, engine: Engine, last: Mapping[str, Any]) -> None:
        """Leaves the folder of the trained model, and that of its adapter."""
        self._leave(engine, LAST, self._objective.export)
        lora, model = self._config.learner.lora, self._config.model
        if lora is not None:
            self._leave(engine, ADAPTER, lambda of, folder: write_adapter(of, model, lora, folder))
        if engine.layout.leads:
            result = {"command": self._command, "steps": self._steps, "ended": time.time(), "metrics": dict(last)}
            try:
                write_atomically(self._folder / RESULT, json.dumps(result, indent=1) + "\n")
            except OSError as error:
                raise _unwritten(self._folder / RESULT, error) from error

    def _leave(self, engine: Engine, name: str, export: Callable[[Engine, Path], None]) -> None:
        """Writes a folder in place of that of an earlier end of the run; collective."""
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
                raise _unwritten(out, error) from error
            log.info("%s has the trained %s", out, "adapter" if name == ADAPTER else "model")


def _unwritten(path: Path, error: OSError) -> DataError:
    return DataError(f"cannot write {path}: {error.strerror or error}", hint="free space there")


def _said_by(checkpoint: Path) -> dict[str, Any]:
    """The caller's part of a checkpoint's state."""
    try:
        state: dict[str, Any] = json.loads((checkpoint / STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"checkpoint {checkpoint} cannot be read: {error}", hint="start over with --fresh") from error
    extra = state.get("extra")
    return extra if isinstance(extra, dict) else state
