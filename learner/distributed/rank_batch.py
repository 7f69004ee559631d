"""A batch's rollouts become the packed micro-batches of a data-parallel rank.

Invariants: a micro-batch's values are those of the rollouts at the moment of packing. Tokens that are not kept are in
no micro-batch and in no count; sequences left out because they are silent are in the counts. A sequence that is
repeated k times is in micro-batches and counts k times. Counts are over all ranks and need no communication, because
every rank holds all rollouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.learner.algorithms.types import GlobalCounts, Rollouts, TokenBatch
from rollmesh.learner.batching.pack import lay_out, trained_mask
from rollmesh.learner.batching.plan import PlanItem, plan_batch
from rollmesh.learner.batching.transfer import to_device
from rollmesh.learner.batching.types import PackedBatch, PackedRow, TrainSequence
from rollmesh.learner.distributed.train_plan import TrainPlan
from rollmesh.learner.engines.layout import Layout

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """A micro-batch that is laid out, and where its values are in the rollouts.

    Attributes:
        members: the sequences, as indices of the batch [S], with repetitions.
        row: for the model.
        sequence_indices: `members` on the device, int64.
        token_indices: int64 on the device, the place of every trained token in the batch's [R].
    """

    members: tuple[int, ...]
    row: PackedRow
    sequence_indices: Tensor
    token_indices: Tensor

    def pack(self, rollouts: Rollouts) -> PackedBatch:
        """Packs the micro-batch with the values of the rollouts as they are now."""
        indices = self.token_indices

        def at(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[indices]

        behaviour = rollouts.behaviour_log_probs[indices]
        advantages = rollouts.advantages
        tokens = TokenBatch(
            sequence_ids=self.row.sequence_ids,
            sequence_lengths=self.row.sequence_lengths,
            behaviour_log_probs=behaviour,
            advantages=torch.zeros_like(behaviour) if advantages is None else advantages[indices],
            staleness=rollouts.staleness[indices],
            sequence_rewards=rollouts.rewards[self.sequence_indices],
            proximal_log_probs=at(rollouts.proximal_log_probs),
            reference_log_probs=at(rollouts.reference_log_probs),
            importance_weights=at(rollouts.importance_weights),
            old_values=at(rollouts.values),
            returns=at(rollouts.returns),
            extra={name: values[indices] for name, values in rollouts.extra.items()},
        )
        lengths = self.row.sequence_lengths
        return PackedBatch(self.row, tokens, GlobalCounts(indices.numel(), int((lengths > 0).sum())))


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerStep:
    """One optimizer step of one role.

    Attributes:
        minibatch: its number in the batch.
        micro_batches, batches: of this rank, laid out and packed; none where other processes compute the role.
        counts: over all ranks.
    """

    minibatch: int
    micro_batches: list[MicroBatch]
    batches: list[PackedBatch]
    counts: GlobalCounts


@dataclass(frozen=True, slots=True, eq=False)
class MinibatchView:
    """All tokens of a minibatch, over all ranks, in the plan's order.

    Attributes:
        token_indices: int64 [V], their places in the batch's [R].
        positions: per micro-batch of this rank int64 [R'], the places of its tokens in [V].
    """

    token_indices: Tensor
    positions: list[Tensor]


class RankBatch:
    """A data-parallel rank's share of a plan.

    Args:
        plan: of the batch.
        layout: of the model that computes it; names the rank.
        sequences: the rank's at least, by their index in the plan.
        lengths: int64 [S], trained tokens of every sequence of the batch.
        device: where micro-batches go.
        token_budget: tokens per micro-batch, where the planned division does not fit any more.
    """

    def __init__(
        self,
        plan: TrainPlan,
        layout: Layout,
        sequences: Mapping[int, TrainSequence],
        lengths: Integers,
        device: torch.device,
        token_budget: int,
    ) -> None:
        self._plan = plan
        self._layout = layout
        self._division = plan.divisions[layout.dp_size].minibatches
        self._sequences = sequences
        self._device = device
        self._token_budget = token_budget
        self._lengths, self._starts = lengths, lengths.cumsum() - lengths
        self._planned: dict[int, list[MicroBatch]] = {}

    @property
    def minibatches(self) -> int:
        """Optimizer steps per pass."""
        return len(self._division)

    @property
    def num_tokens(self) -> int:
        """R: trained tokens of the whole batch."""
        return int(self._lengths.sum())

    def token_indices(self, members: Integers) -> Integers:
        """Places in [R] of the trained tokens of sequences, one sequence after another."""
        counts = self._lengths[members]
        ends = counts.cumsum()
        total = int(ends[-1]) if len(ends) else 0
        return np.arange(total) + np.repeat(self._starts[members] - (ends - counts), counts)

    def planned_micro_batches(self, minibatch: int) -> list[MicroBatch]:
        """The planned micro-batches, with all tokens."""
        if minibatch not in self._planned:
            planned = self._division[minibatch][self._layout.dp_rank]
            self._planned[minibatch] = [self._lay_out(micro, None) for micro in planned]
        return self._planned[minibatch]

    def planned_with(self, chosen: NDArray[np.bool_]) -> MicroBatch | None:
        """The first planned micro-batch that has one of the chosen sequences, flags [S]; with all tokens."""
        for division in self._division:
            for micro in division[self._layout.dp_rank]:
                if chosen[list(micro)].any():
                    return self._lay_out(micro, None)
        return None

    def steps(self, rollouts: Rollouts, *, skip_zero_advantage: bool) -> list[OptimizerStep]:
        """One optimizer step per minibatch of the tokens that the rollouts keep.

        Args:
            rollouts: the batch.
            skip_zero_advantage: compute nothing for sequences with advantages of 0.
        """
        kept = _kept_mask(rollouts)
        lengths = self._kept_lengths(kept)
        repeats = _repeats(rollouts)
        computed = repeats * (lengths > 0)
        if skip_zero_advantage and rollouts.advantages is not None:
            nonzero = rollouts.advantages.detach().cpu().numpy() != 0
            computed = computed * (self._kept_lengths(nonzero if kept is None else nonzero & kept) > 0)
        steps = []
        for minibatch in range(self.minibatches):
            micro_batches = self._micro_batches(minibatch, computed, kept)
            members = self._all_members(minibatch)
            counts = GlobalCounts(
                int((lengths * repeats)[members].sum()), int(((lengths > 0) * repeats)[members].sum())
            )
            steps.append(
                OptimizerStep(minibatch, micro_batches, [micro.pack(rollouts) for micro in micro_batches], counts)
            )
        return steps

    def minibatch_view(self, minibatch: int, step: OptimizerStep, rollouts: Rollouts) -> MinibatchView:
        """All tokens that a minibatch trains, silent sequences included, and the places of this rank's part."""
        kept = _kept_mask(rollouts)
        lengths = self._kept_lengths(kept)
        repeats = _repeats(rollouts)
        members = self._all_members(minibatch)
        members = np.repeat(members, repeats[members])
        starts = lengths[members].cumsum() - lengths[members]
        first = dict(zip(reversed(members.tolist()), reversed(starts.tolist()), strict=True))
        tokens = self.token_indices(members)
        if kept is not None:
            tokens = tokens[kept[tokens]]
        seen: Counter[int] = Counter()
        positions = []
        for micro in step.micro_batches:
            ranges = []
            for member in micro.members:
                start = first[member] + seen[member] * lengths[member]
                ranges.append(np.arange(start, start + lengths[member]))
                seen[member] += 1
            positions.append(self._to_device(np.concatenate(ranges)))
        return MinibatchView(self._to_device(tokens), positions)

    def _micro_batches(self, minibatch: int, computed: Integers, kept: NDArray[np.bool_] | None) -> list[MicroBatch]:
        planned = self._division[minibatch][self._layout.dp_rank]
        members = np.array([member for micro in planned for member in micro], dtype=np.int64)
        if kept is None and (computed[members] == 1).all():
            return self.planned_micro_batches(minibatch)
        chosen = np.repeat(np.sort(members), computed[np.sort(members)]).tolist()
        return [self._lay_out(micro, kept) for micro in self._divide(chosen)]

    def _divide(self, members: Sequence[int]) -> list[tuple[int, ...]]:
        """Micro-batches of sequences of one minibatch, in the plan's order."""
        items = [
            PlanItem(
                self._plan.members[member].prompt,
                len(self._sequences[member].prompt_ids),
                len(self._sequences[member].response_ids),
            )
            for member in members
        ]
        division = plan_batch(items, token_budget=self._token_budget, packing=self._plan.packing).minibatches[0][0]
        return [tuple(members[index] for index in micro) for micro in division]

    def _lay_out(self, members: Sequence[int], kept: NDArray[np.bool_] | None) -> MicroBatch:
        chosen = [self._sequences[member] for member in members]
        sequences = np.array(members, dtype=np.int64)
        mask = trained_mask(chosen)
        tokens = self.token_indices(sequences)
        if kept is not None:
            mask[np.flatnonzero(mask)] = kept[tokens]
            tokens = tokens[kept[tokens]]
        row = lay_out(chosen, mask, self._device)
        return MicroBatch(tuple(members), row, self._to_device(sequences), self._to_device(tokens))

    def _all_members(self, minibatch: int) -> Integers:
        """Sequences of a minibatch over all ranks, in the plan's order."""
        return np.sort(self._plan.rank_order(self._layout, [minibatch]))

    def _kept_lengths(self, kept: NDArray[np.bool_] | None) -> Integers:
        """Tokens with the flag per sequence of the batch."""
        if kept is None:
            return self._lengths
        owner = np.repeat(np.arange(len(self._lengths)), self._lengths)
        return np.bincount(owner[kept], minlength=len(self._lengths))

    def _to_device(self, values: Integers) -> Tensor:
        return to_device(values, self._device)


def _kept_mask(rollouts: Rollouts) -> NDArray[np.bool_] | None:
    return None if rollouts.keep is None else rollouts.keep.cpu().numpy().astype(bool)


def _repeats(rollouts: Rollouts) -> Integers:
    if rollouts.repeats is None:
        return np.ones(rollouts.num_sequences, dtype=np.int64)
    return rollouts.repeats.cpu().numpy().astype(np.int64)
