"""One rank of `rollmesh sft`, `rollmesh rm` or `rollmesh dpo`, from its files to the folder that it leaves.

Invariants: a run continues in its folder from its last checkpoint, with the same data in the same order. The folders
in `hf` are whole or are not there. SIGTERM ends the run after the present step, with a checkpoint.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rollmesh.learner.builders import watch_ranks
from rollmesh.learner.callbacks.interface import NO_CALLBACKS, EventSink
from rollmesh.learner.checkpoint.compatibility import trained_form
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME
from rollmesh.learner.checkpoint.retention import sweep
from rollmesh.learner.checkpoint.store import CheckpointStore, load_checkpoint
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.data.parts.template_marks import ROW_MISSES_TEMPLATE
from rollmesh.learner.engine_specs import compute_deterministically, device_of, engine_spec
from rollmesh.learner.engines.interface import ACTOR, Engine
from rollmesh.learner.engines.megatron.environment import prepare_environment
from rollmesh.learner.engines.registry import create_engine
from rollmesh.learner.examination.folder import examine
from rollmesh.learner.liveness.start_notice import note_every_minute
from rollmesh.learner.metrics.trackers.opening import check_trackers
from rollmesh.learner.model_files.location import context_length, embedding_rows, resolve_model
from rollmesh.learner.start_requirements import check_schedule
from rollmesh.learner.trainers.beginning import Beginning, agree
from rollmesh.learner.trainers.best import BestByMetric
from rollmesh.learner.trainers.checkpoints import Checkpoints
from rollmesh.learner.trainers.example_loader import ExampleLoader
from rollmesh.learner.trainers.exports import leave_folders
from rollmesh.learner.trainers.identity import (
    KEY,
    digest_of,
    held_out_identity,
    measured_by,
    prepared_identity,
)
from rollmesh.learner.trainers.loop import LoopRules, TrainingLoop
from rollmesh.learner.trainers.objectives.interface import Preparation, PreparationInterrupted
from rollmesh.learner.trainers.objectives.registry import build_objective
from rollmesh.learner.trainers.record import write_record
from rollmesh.learner.trainers.records import Records
from rollmesh.learner.trainers.rows import check_of, held_out_rows, training_rows
from rollmesh.learner.written.ends import end_notices
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.trainers.configs import TrainerConfig
from rollmesh.mesh.runtime.memory_tuning import freeze_heap
from rollmesh.mesh.runtime.ranks import check_ranks, choose_interface
from rollmesh.mesh.tokenizer_files import load_tokenizer

log = logging.getLogger(__name__)
_AT_ONCE_S = 0.3


def train_rank(
    command: str, config: TrainerConfig, controls: ControlRequests, begins: Callable[[], None] = lambda: None
) -> bool:
    """Trains to the end; collective over the ranks. False: interrupted before.

    Args:
        command: `sft`, `rm` or `dpo`.
        config: of the run.
        controls: of rank 0, which asks it to end after the present step.
        begins: called once nothing is refused any more: the folder is this training's.

    Raises:
        CallbackError: a callback has ended the training.
        ConfigError: a setting that cannot be; a run that was begun with something else.
        DataError: a model, a file or a row that cannot be used.
        DivergedError: gradients stay infinite.
        RankLostError: another rank is lost.
    """
    check_ranks(SecuritySection(allow_insecure=config.security.allow_insecure))
    choose_interface(config.learner.distributed.interface)
    if config.learner.deterministic:
        compute_deterministically()
    if config.learner.engine == "megatron":
        prepare_environment()
    limit_s = config.learner.distributed.timeout_s
    with ExitStack() as closers:
        watch = closers.enter_context(watch_ranks(config.run.folder, limit_s, limit_s))
        with watch.phase("train"):
            return _Training(command, config, controls, closers, begins).run()


class _Training:
    """The parts of one rank."""

    def __init__(
        self,
        command: str,
        config: TrainerConfig,
        controls: ControlRequests,
        closers: ExitStack,
        begins: Callable[[], None] = lambda: None,
    ) -> None:
        self._command, self._controls, self._closers, self._begins = command, controls, closers, begins
        with note_every_minute("fetches the model"):
            model = resolve_model(config.model)
        # No longer sequences than the model knows.
        longest = min(config.data.max_tokens, context_length(Path(model.path)) or config.data.max_tokens)
        data = config.data.model_copy(update={"max_tokens": longest})
        self._given = config
        self._config = config = config.model_copy(update={"model": model, "data": data})
        self._folder = config.run.folder
        tokenizer = load_tokenizer(Path(model.path))
        chat = ChatEncoder(tokenizer, data.chat_template_kwargs, embedding_rows(Path(model.path)))
        self._objective = build_objective(config, chat)
        if _leads():
            self._examine(Path(model.path))
        epochs = data.epochs or (None if config.learner.steps else 1)
        self._train = training_rows(data, self._objective.form, seed=config.run.seed, epochs=epochs)
        self._held_out = held_out_rows(data, self._objective.form, config.eval.rows)
        self._checked = check_of(data, self._objective.form)
        # Small data are refused before the model is loaded.
        self._checked.within(_AT_ONCE_S)
        by_epochs = self._train.steps(config.learner.batch.rows)
        self._steps = min(steps for steps in (config.learner.steps, by_epochs) if steps is not None)
        check_schedule("learner.optimizer", config.learner.optimizer, self._steps)

    def _examine(self, model: Path) -> None:
        """Says what is odd about the model's folder."""
        backbone_only = self._objective.model_type == "value_model"
        for notice in examine(model, "model.path", backbone_only=backbone_only):
            log.warning("%s", notice)

    def run(self) -> bool:
        """See `train_rank`."""
        begun, records = self._begin() if _leads() else (None, None)
        try:
            complete = self._train_and_export(begun, records)
        except PreparationInterrupted:
            complete = False
        except BaseException as error:
            if records is not None:
                records.close("error", str(error))
            raise
        if records is not None:
            records.close("steps" if self._controls.stop_reason is None else self._controls.stop_reason)
            if not complete:
                log.info("ended early: the same command continues the run where it is now")
        return complete

    def _begin(self) -> tuple[Beginning, Records]:
        """Refuses on rank 0 what cannot be, before the model is loaded."""
        check_trackers(self._config)
        for notice in end_notices(self._config):
            log.warning("%s", notice)
        begun = Beginning.find(self._command, self._config)
        return begun, Records(self._config, self._controls, self._steps)

    def _train_and_export(self, begun: Beginning | None, records: Records | None) -> bool:
        engine = self._open_engine()
        self._checked.wait()
        if begun is not None:
            self._note_texts()
        loader = ExampleLoader(engine.world)
        self._closers.callback(loader.close)
        events = records.callbacks if records is not None else NO_CALLBACKS
        start, checkpoints = self._continue(engine, loader, agree(begun, engine.world), events)
        complete = self._loop(engine, loader, start, checkpoints, records)
        if complete:
            leave_folders(engine, self._objective, self._config, checkpoints)
        return complete

    def _note_texts(self) -> None:
        """Says whether the first step has texts that a chat template may be meant for."""
        first = self._train.source.rows(self._train.of_step(0, self._config.learner.batch.rows))
        if any(example is not None and example.misses_template for example in first):
            log.warning("in data.train %s", ROW_MISSES_TEMPLATE)

    def _loop(
        self, engine: Engine, loader: ExampleLoader, start: int, checkpoints: Checkpoints, records: Records | None
    ) -> bool:
        """Trains the steps that are left."""
        config = self._config
        if records is not None:
            records.begin(checkpoints.incarnation, start)
            if start < self._steps:
                log.info("%s: steps %d to %d, %d rows", self._command, start + 1, self._steps, len(self._train.source))
            else:
                log.info("nothing to train: %d steps are done, and %d are asked for", start, self._steps)
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

    def _continue(
        self, engine: Engine, loader: ExampleLoader, begun: Beginning, events: EventSink
    ) -> tuple[int, Checkpoints]:
        """Prepares the objective and loads the last checkpoint; gives the steps that are done. Collective."""
        config, root, leads = self._config, self._folder / CHECKPOINTS_NAME, engine.layout.leads
        store = CheckpointStore(root)
        self._closers.callback(store.close)
        store.check(engine)
        if leads and not begun.checkpoint:
            # At once, for the preparation may take long, and the folder says what is done there.
            self._take_folder()
        self._prepare(Preparation(engine, loader, self._interrupted), begun.identity)
        start, best = 0, None
        if begun.checkpoint:
            start = int(str(load_checkpoint({ACTOR: engine}, root / begun.checkpoint)["step"]))
            # Not before: an attempt that fails changes nothing of the run.
            if leads:
                self._take_folder()
        if leads:
            sweep(root, begun.incarnation)
            if begun.checkpoint:
                log.info("continues after step %d, from %s", start, begun.checkpoint)
            if config.checkpoint.best and self._held_out:
                best = BestByMetric(root, begun.incarnation, config.eval, measured_by(config))
        checkpoints = Checkpoints(
            store,
            root,
            begun.incarnation,
            {KEY: dict(begun.identity), **trained_form(config.learner)},
            config.checkpoint,
            last_name=begun.checkpoint,
            best=best,
            controls=self._controls,
            events=events,
        )
        return start, checkpoints

    def _take_folder(self) -> None:
        write_record(self._command, self._given)
        self._begins()

    def _prepare(self, parts: Preparation, identity: Mapping[str, str]) -> None:
        """Has the objective prepare the rows that will be used."""
        rows, objective = self._config.learner.batch.rows, self._objective
        prepared = prepared_identity(identity, self._config.learner, device_of(self._config.learner.device))
        cache = self._folder / f"prepared-{digest_of(prepared)}.npy"
        self._train = objective.prepare(parts, self._train, self._steps, cache)
        held_out = digest_of(held_out_identity(prepared, self._config)) if self._held_out else ""
        for number, (label, own) in enumerate(self._held_out.items()):
            cache = self._folder / f"prepared-{held_out}-{number}.npy"
            self._held_out[label] = objective.prepare(parts, own, own.steps(rows) or 0, cache)

    def _interrupted(self) -> bool:
        return self._controls.stop_reason is not None or self._controls.error is not None


def _leads() -> bool:
    """True in the process that will lead the engine's."""
    return int(os.environ.get("RANK", "0")) == 0


def _unheard(_step: int, _record: Mapping[str, Any]) -> None:
    """Rank 0 alone writes records."""
