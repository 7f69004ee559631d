"""One rank of a role's processes: its engine, and what it computes of the batch that the learner gave.

Invariants: every method is collective over the role's ranks, and called with the same arguments. A request that is
refused is refused on all of them, and has changed nothing, unless `attach` says otherwise.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.learner.algorithms.interface import Algorithm, Loss
from rollmesh.learner.algorithms.types import ModelOutput, ModelRole, Rollouts
from rollmesh.learner.batching.pack import check_sequence, response_lengths, trained_mask
from rollmesh.learner.checkpoint.collective_write import Ranks
from rollmesh.learner.checkpoint.deadlines import WRITE_S
from rollmesh.learner.distributed.rank_batch import OptimizerStep, RankBatch
from rollmesh.learner.distributed.role_batch import EngineBatch
from rollmesh.learner.engines.interface import Engine, StepResult
from rollmesh.learner.engines.schedule import RunStep
from rollmesh.learner.engines.world import World
from rollmesh.learner.roles.batch_tensors import holds_sequences, to_rollouts, to_sequences
from rollmesh.learner.roles.tensor_parts import Arrays
from rollmesh.mesh.errors import ConfigError, DataError, PayloadError

_FIELDS = ("log_probs", "entropy", "sum_pi_squared", "values")


class RoleWorker:
    """The model of a role, on one of its ranks.

    Args:
        role: of the algorithm.
        algorithm: of the run; its methods are the losses.
        build: makes the engine; called again where the model has to be as it was loaded first.
        token_budget: tokens per micro-batch.
    """

    def __init__(
        self, role: ModelRole, algorithm: Algorithm, build: Callable[[], Engine], *, token_budget: int
    ) -> None:
        self._role = role
        self._algorithm = algorithm
        self._build = build
        self._token_budget = token_budget
        self._engine: Engine | None = build()
        # Keeps the ranks' process group while an engine takes the place of another one.
        self._world = World(self.engine.device.type, need_group=False)
        self._is_initial = True
        self._tensors: Arrays = {}
        self._batch: EngineBatch | None = None
        self._groups: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._lengths: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._rollouts: Rollouts | None = None
        self._steps: dict[bool, list[OptimizerStep]] = {}
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._apart: Ranks | None = None
        self._written: Future[None] = Future()
        self._written.set_result(None)

    @property
    def engine(self) -> Engine:
        """The engine of this rank.

        Raises:
            DataError: its model could not be loaded again.
        """
        if self._engine is None:
            raise DataError(
                f"role {self._role.name} has no model: it could not be loaded again", hint="attach a learner again"
            )
        return self._engine

    def attach(self, checkpoint: str) -> None:
        """Gives up what an earlier learner has begun; the model is then that of a checkpoint, or the initial one.

        Args:
            checkpoint: folder of the role's part; empty: the initial one.

        Raises:
            DataError: it is not here, or of another model. Where the initial model cannot be loaded again, there is
                none until it can.
        """
        wait([self._written], WRITE_S)
        self._tensors, self._batch, self._rollouts = {}, None, None
        if self._engine is None or not (checkpoint or self._is_initial):
            self._load()
        self.engine.discard()
        if checkpoint:
            folder = Path(checkpoint)
            self._require(
                folder, "resume where the role's processes see the run's folder, or copy the checkpoint there"
            )
            self._is_initial = False
            self.engine.load_checkpoint(folder)

    def put(self, tensors: Arrays, kept: Sequence[str]) -> None:
        """Takes tensors of a batch.

        Args:
            tensors: by name; sequences begin another batch.
            kept: names of earlier ones that stay; all others are dropped.

        Raises:
            PayloadError: a sequence does not fit the model.
        """
        if missing := [name for name in kept if name not in self._tensors]:
            raise PayloadError("header.kept", f"{missing[0]} is not here")
        self._tensors = {name: self._tensors[name] for name in kept} | tensors
        self._rollouts, self._steps = None, {}
        if holds_sequences(tensors):
            self._open()

    def infer(self, minibatches: Sequence[int], *, sum_pi_squared: bool) -> Arrays:
        """The model's output for the batch, by field: float32 [R]; see `RoleBatch.infer`."""
        output = self._opened().infer(self._read_rollouts(), minibatches, sum_pi_squared=sum_pi_squared)
        return _fields(output)

    def accumulate(self, loss: str, minibatch: int, *, skip_zero_advantage: bool, state: str) -> None:
        """Computes the gradient of one step.

        Args:
            loss: method of the algorithm.
            minibatch: its number.
            skip_zero_advantage: leave out sequences without advantage.
            state: the algorithm's own, as JSON.

        Raises:
            ConfigError: the role is not trained, or there is no such loss.
        """
        compute = self._loss(loss)
        self._algorithm.restore(json.loads(state))
        batch = self._opened()
        if skip_zero_advantage not in self._steps:
            self._steps[skip_zero_advantage] = batch.steps(
                self._read_rollouts(), skip_zero_advantage=skip_zero_advantage
            )
        batch.accumulate(self._steps[skip_zero_advantage][minibatch], compute)

    def apply(self, step: int, steps: int) -> StepResult:
        """The optimizer step; the numbers are those of a `RunStep`."""
        self._is_initial = False
        return self.engine.apply(RunStep(step, steps))

    def discard(self) -> None:
        """Gives up the gradient."""
        self.engine.discard()

    def begin_checkpoint(self, folder: str, extra: dict[str, object]) -> None:
        """Has the role's part of a checkpoint written; the state is copied when this returns.

        Raises:
            DataError: a rank does not see the folder.
        """
        wait([self._written], WRITE_S)
        self._require(Path(folder), "set run.dir to a folder that the learner and the role's processes see")
        if self._apart is None:
            self._apart = Ranks.apart(self.engine)
        part = self.engine.begin_checkpoint(Path(folder), extra)
        self._written = self._thread.submit(self._apart.on_every_rank, partial(_await, part, folder))

    @property
    def written(self) -> Future[None]:
        """Done when the last checkpoint that was begun is written, on all ranks; an OSError where one could not."""
        return self._written

    def close(self) -> None:
        """Waits for what is written, and frees the engine."""
        wait([self._written], WRITE_S)
        self._thread.shutdown(wait=False)
        self._close_engine()
        self._world.close()

    def _load(self) -> None:
        # Two models at once may not fit.
        self._close_engine()
        self._engine = self._build()
        self._is_initial = True

    def _close_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def _open(self) -> None:
        engine = self.engine
        try:
            sequences = to_sequences(self._tensors)
            self._batch = None
            plan, found = sequences.divide(
                engine.layout.dp_size,
                token_budget=self._token_budget,
                packing=engine.packing,
                cost=engine.cost.sequence_flops,
            )
        except (TypeError, ValueError, IndexError) as error:
            raise PayloadError("sequences", f"not a batch: {error}") from error
        for index, sequence in found.items():
            check_sequence(index, sequence)
        ids = sequences.response_ids, sequences.prompt_ids
        if any(array.size and not 0 <= array.min() <= array.max() < engine.vocab_size for array in ids):
            raise PayloadError("sequences", f"token ids beyond the {engine.vocab_size} of role {self._role.name}")
        ordered = list(found.values())
        owner = np.repeat(np.arange(len(ordered)), response_lengths(ordered))
        self._lengths = np.bincount(owner[trained_mask(ordered)], minlength=len(ordered)).astype(np.int64)
        self._groups = sequences.groups
        share = RankBatch(plan, engine.layout, found, self._lengths, engine.device, self._token_budget)
        self._batch = EngineBatch(plan, engine, self._role.kind, share)

    def _opened(self) -> EngineBatch:
        if self._batch is None:
            raise PayloadError("sequences", "no batch is here")
        return self._batch

    def _read_rollouts(self) -> Rollouts:
        if self._rollouts is None:
            self._rollouts = to_rollouts(self._tensors, self._groups, self._lengths, self.engine.device)
        return self._rollouts

    def _loss(self, name: str) -> Loss:
        if not self._role.trained:
            raise ConfigError(f"role {self._role.name} is not trained")
        found: Any = None if name.startswith("_") else getattr(self._algorithm, name, None)
        if not callable(found):
            raise ConfigError(
                f"algorithm {type(self._algorithm).__qualname__} has no loss {name!r}",
                hint="start the role's processes with the learner's configuration and code",
            )
        loss: Loss = found
        return loss

    def _require(self, folder: Path, hint: str) -> None:
        """Refuses a folder that some rank does not see; collective."""
        try:
            Ranks.of(self.engine).on_every_rank(partial(os.stat, folder))
        except OSError as error:
            raise DataError(f"role {self._role.name} cannot use {folder}: {error}", hint=hint) from error


def _fields(output: ModelOutput) -> Arrays:
    found = {name: getattr(output, name) for name in _FIELDS}
    return {name: values.float().cpu().numpy() for name, values in found.items() if values is not None}


def _await(part: Future[None], folder: str) -> None:
    wait([part], WRITE_S)
    if not part.done():
        raise OSError(f"{folder} is not written after {WRITE_S:.0f} s")
    part.result()
