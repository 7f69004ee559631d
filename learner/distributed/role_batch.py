"""A batch as one role's model computes it: in the learner's own processes, or elsewhere.

Invariants: every method is collective over the learner's ranks. After it all of them hold the same values, in the order
of the plan's members, whichever process has computed them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rollmesh.learner.algorithms.interface import Loss
from rollmesh.learner.algorithms.types import ModelOutput, Rollouts
from rollmesh.learner.batching.transfer import to_device
from rollmesh.learner.checkpoint.store import Checkpointed
from rollmesh.learner.distributed.batch_sequences import BatchSequences
from rollmesh.learner.distributed.rank_batch import OptimizerStep, RankBatch
from rollmesh.learner.distributed.train_plan import TrainPlan
from rollmesh.learner.engines.interface import Engine, StepResult
from rollmesh.learner.engines.schedule import RunStep


class RoleBatch(ABC):
    """One role's work on a batch."""

    @abstractmethod
    def infer(self, rollouts: Rollouts, minibatches: Sequence[int], *, sum_pi_squared: bool = False) -> ModelOutput:
        """The model's output for the trained tokens of some minibatches, without gradient.

        Args:
            rollouts: the batch.
            minibatches: their numbers.
            sum_pi_squared: give that field too (language models).

        Returns:
            Per trained token [R]; tokens of other minibatches are 0.
        """

    @abstractmethod
    def steps(self, rollouts: Rollouts, *, skip_zero_advantage: bool) -> list[OptimizerStep]:
        """The optimizer steps on the rollouts as they are now, one per minibatch."""

    @abstractmethod
    def accumulate(self, step: OptimizerStep, loss: Loss) -> None:
        """Computes the gradient of a step of `steps`; see `Engine.accumulate`."""

    @abstractmethod
    def apply(self, at: RunStep) -> StepResult:
        """The optimizer step; see `Engine.apply`."""

    @abstractmethod
    def discard(self) -> None:
        """Gives up the gradient; see `Engine.discard`."""


class RoleElsewhere(Checkpointed, Protocol):
    """A role whose model other processes hold; every method is collective over the learner's ranks."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it; known once the role is attached."""
        ...

    def attach(self, incarnation: int) -> None:
        """Has the role serve this learner, with the model of the checkpoint that was loaded last.

        Args:
            incarnation: of this learner.

        Raises:
            RoleLostError: the role stays away.
            ConfigError: it has other settings than the learner.
        """
        ...

    def open_batch(self, sequences: BatchSequences | None, minibatches: int) -> RoleBatch:
        """Begins the work on a batch.

        Args:
            sequences: of the whole batch, in the leading process; None in the others.
            minibatches: into which it is divided.
        """
        ...


class EngineBatch(RoleBatch):
    """The work of an engine of this process on its share of a batch.

    Args:
        plan: of the batch.
        engine: of this process.
        kind: `language_model` or `value_model`.
        rank_batch: the share of its data-parallel rank.
        adapter: False: the base model computes, as if its adapter had never been trained.
    """

    def __init__(
        self, plan: TrainPlan, engine: Engine, kind: str, rank_batch: RankBatch, *, adapter: bool = True
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._kind = kind
        self._rank_batch = rank_batch
        self._adapter = adapter

    def infer(self, rollouts: Rollouts, minibatches: Sequence[int], *, sum_pi_squared: bool = False) -> ModelOutput:
        batches = [
            micro.pack(rollouts)
            for minibatch in minibatches
            for micro in self._rank_batch.planned_micro_batches(minibatch)
        ]
        parts = self._engine.infer(batches, sum_pi_squared=sum_pi_squared, adapter=self._adapter)

        def gather_values(name: str) -> Tensor:
            own = [getattr(part, name) for part in parts]
            values = torch.cat(own) if own else torch.zeros(0, device=self._engine.device)
            return self.gather_tokens(values, minibatches)

        if self._kind == "value_model":
            return ModelOutput(values=gather_values("values"))
        return ModelOutput(
            log_probs=gather_values("log_probs"),
            entropy=gather_values("entropy"),
            sum_pi_squared=gather_values("sum_pi_squared") if sum_pi_squared else None,
        )

    def steps(self, rollouts: Rollouts, *, skip_zero_advantage: bool) -> list[OptimizerStep]:
        return self._rank_batch.steps(rollouts, skip_zero_advantage=skip_zero_advantage)

    def accumulate(self, step: OptimizerStep, loss: Loss) -> None:
        self._engine.accumulate(step.batches, loss, step.counts)

    def apply(self, at: RunStep) -> StepResult:
        return self._engine.apply(at)

    def discard(self) -> None:
        self._engine.discard()

    def gather_tokens(self, values: Tensor, minibatches: Sequence[int] | None = None) -> Tensor:
        """[R] values in the plan's order, from those of every rank; 0 for tokens that no rank gave.

        Args:
            values: of this process's rank, of the tokens of its micro-batches.
            minibatches: those that they are of; None: all.
        """
        engine = self._engine
        gathered = values if engine.layout.processes == 1 else torch.cat(engine.gather(values))
        members = self._plan.rank_order(engine.layout, minibatches)
        if np.array_equal(members, np.arange(len(self._plan.members))):
            return gathered
        result = torch.zeros(self._rank_batch.num_tokens, dtype=values.dtype, device=engine.device)
        result[to_device(self._rank_batch.token_indices(members), engine.device)] = gathered
        return result
