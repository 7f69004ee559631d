"""One rank's part of the training: its share of a plan becomes packed micro-batches, then optimizer steps.

Invariant: every method is collective. All ranks call the same methods in the same order with the same plan, so that
each optimizer step and each checkpoint sees all of them; a rank without a share of a minibatch takes part with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from learner.algorithms.base import Algorithm
from learner.batching.pack import pack
from learner.batching.types import PackedBatch, TrainSequence
from learner.checkpoint.store import CheckpointStore
from learner.engines.base import Engine, RoleBatch, StepResult
from learner.payloads import Payloads
from learner.plan import PlannedMember, TrainPlan
from mesh.errors import PayloadError
from mesh.trajectory import Trajectory
from mesh.versions import PolicyVersion

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What training on one batch did; the same on every rank.

    Attributes:
        metrics: of engine and algorithm, averaged over the optimizer steps.
        skipped: optimizer steps whose gradient was not finite.
    """

    metrics: dict[str, float]
    skipped: int


class Worker:
    """Trains with the engines of this rank.

    Args:
        engines: by role; `actor` is the one that is trained.
        algorithm: stages and loss.
        payloads: this rank's trajectories.
        store: of the checkpoints.
        epochs: passes over a batch.
    """

    def __init__(
        self,
        engines: Mapping[str, Engine],
        algorithm: Algorithm,
        payloads: Payloads,
        store: CheckpointStore,
        *,
        epochs: int,
    ) -> None:
        self._engines = engines
        self._actor = engines["actor"]
        self._algorithm = algorithm
        self._payloads = payloads
        self._store = store
        self._epochs = epochs
        self._minibatches: list[list[PackedBatch]] = []

    def prepare(self, plan: TrainPlan) -> None:
        """Packs this rank's share; a plan that was not trained is replaced.

        Raises:
            PayloadError: a trajectory is malformed or contradicts the plan.
        """
        rank = self._actor.rank
        own = sorted({i for minibatch in plan.division.minibatches for micro in minibatch[rank] for i in micro})
        members = [plan.members[index] for index in own]
        prompts = [prompt.array() for prompt in plan.prompts]
        sequences = [
            _sequence(plan, prompts[member.prompt], member, found)
            for member, found in zip(members, self._payloads.get(members), strict=True)
        ]
        place = {index: position for position, index in enumerate(own)}
        silent = self._algorithm.silent_without_advantage
        self._minibatches = [
            [
                pack(sequences, [place[i] for i in micro], self._actor.device, leave_out_silent=silent)
                for micro in minibatch[rank]
            ]
            for minibatch in plan.division.minibatches
        ]

    def train(self, before_first_update: Callable[[], None]) -> TrainResult:
        """All optimizer steps on the prepared batch.

        Args:
            before_first_update: called when everything is ready for the first update; what it raises ends the
                training with nothing changed.
        """
        minibatches, self._minibatches = self._minibatches, []
        everything = [batch for minibatch in minibatches for batch in minibatch]
        self._algorithm.batch_stage(RoleBatch(everything, self._engines))
        counts = [self._actor.global_counts(minibatch) for minibatch in minibatches]
        results: list[StepResult] = []
        for _ in range(self._epochs):
            for minibatch, count in zip(minibatches, counts, strict=True):
                before = None if results else before_first_update
                results.append(self._actor.train_batch(minibatch, self._algorithm.loss, count, before))
        return TrainResult(_mean([result.metrics for result in results]), sum(result.skipped for result in results))

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The actor's weights under Hugging Face names; every rank has to exhaust the iterator."""
        return self._actor.export_weights()

    def save(self, version: PolicyVersion, extra: dict[str, object]) -> Path:
        """Writes a checkpoint of the actor; it is durable when this returns.

        Raises:
            DataError: the disk refuses.
        """
        return self._store.save(self._actor, version, extra)

    def load(self, folder: Path) -> dict[str, object]:
        """Goes back to a checkpoint of the actor; gives what was stored beside it."""
        return self._actor.load_checkpoint(folder)

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


def _mean(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean per name over the parts that have it."""
    if len(parts) == 1:
        return dict(parts[0])
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def _sequence(plan: TrainPlan, prompt: NDArray[np.int32], member: PlannedMember, found: Trajectory) -> TrainSequence:
    return TrainSequence(
        prompt_ids=prompt,
        response_ids=found.response_ids,
        response_mask=found.response_mask,
        behaviour_log_probs=found.log_probs,
        advantages=_spread(member, found.response_mask),
        staleness=plan.lineage.per_token(found.versions, plan.version),
        temperature=plan.prompts[member.prompt].temperature,
    )


def _spread(member: PlannedMember, mask: NDArray[np.uint8]) -> NDArray[np.float32] | float:
    """Advantages per response token: one value for all, or one per trained token put where the mask is 1."""
    values = np.frombuffer(member.advantages, dtype="<f4")
    if len(values) == 1:
        return float(values[0])
    places = np.flatnonzero(mask)
    if len(values) != len(places):
        raise PayloadError(
            "advantages", f"{member.group_id}/{member.member}: {len(values)} values for {len(places)} trained tokens"
        )
    spread = np.zeros(len(mask), dtype=np.float32)
    spread[places] = values
    return spread
