"""All sequences of a batch in one process, for a model whose processes are not the learner's.

Invariant: sequences stand in the plan's order, so that every process which has them computes the same divisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.learner.batching.plan import BatchPlan, PlanItem, SequenceCost, plan_batch
from rollmesh.learner.batching.types import Packing, TrainSequence
from rollmesh.learner.distributed.train_plan import PlannedMember, PlannedPrompt, TrainPlan
from rollmesh.learner.engines.interface import Engine
from rollmesh.mesh.trajectory.lineage import Lineage


@dataclass(frozen=True, slots=True, eq=False)
class BatchSequences:
    """Prompts and responses of a batch; G groups, S sequences.

    Attributes:
        version: int64 [1], the policy version that is trained.
        prompt_ids: int32, token ids of all prompts side by side.
        prompt_lengths: int64 [G].
        temperatures: float32 [G], of the sampling.
        groups: int64 [S], the group of each sequence.
        minibatches: int64 [S], the minibatch of each sequence.
        response_ids: int32 [T], token ids of all responses side by side.
        response_masks: uint8 [T], 1 = trained.
        response_lengths: int64 [S].
    """

    version: NDArray[np.int64]
    prompt_ids: NDArray[np.int32]
    prompt_lengths: NDArray[np.int64]
    temperatures: NDArray[np.float32]
    groups: NDArray[np.int64]
    minibatches: NDArray[np.int64]
    response_ids: NDArray[np.int32]
    response_masks: NDArray[np.uint8]
    response_lengths: NDArray[np.int64]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays by name; `BatchSequences(**arrays)` is the inverse."""
        return {name: getattr(self, name) for name in BatchSequences.__slots__}

    def divide(
        self, ranks: int, *, token_budget: int, packing: Packing, cost: SequenceCost
    ) -> tuple[TrainPlan, dict[int, TrainSequence]]:
        """The plan of the batch for other processes, with the same minibatches, and all of its sequences.

        Args:
            ranks: data-parallel ranks.
            token_budget: tokens per micro-batch.
            packing: how their model computes a micro-batch.
            cost: of sequences, by which the ranks are balanced.
        """
        prompts = _split(self.prompt_ids, self.prompt_lengths)
        planned = [
            PlannedPrompt(ids.astype("<i4").tobytes(), float(temperature))
            for ids, temperature in zip(prompts, self.temperatures, strict=True)
        ]
        lengths = self.response_lengths.tolist()
        members = [
            PlannedMember(group, "", index, length, 0.0, truncated=False)
            for index, (group, length) in enumerate(zip(self.groups.tolist(), lengths, strict=True))
        ]
        items = [PlanItem(m.prompt, len(prompts[m.prompt]), m.response_tokens) for m in members]
        steps = []
        for minibatch in range(int(self.minibatches.max()) + 1):
            (chosen,) = np.nonzero(self.minibatches == minibatch)
            (step,) = plan_batch(
                [items[index] for index in chosen], token_budget=token_budget, ranks=ranks, packing=packing, cost=cost
            ).minibatches
            steps.append(tuple(tuple(tuple(int(chosen[i]) for i in micro) for micro in rank) for rank in step))
        division = {ranks: BatchPlan(tuple(steps))}
        plan = TrainPlan(int(self.version[0]), Lineage(()), planned, members, (), division, packing)
        return plan, dict(enumerate(self._sequences(prompts)))

    def _sequences(self, prompts: Sequence[NDArray[np.int32]]) -> Iterator[TrainSequence]:
        ids, masks = (_split(values, self.response_lengths) for values in (self.response_ids, self.response_masks))
        for group, response, mask in zip(self.groups.tolist(), ids, masks, strict=True):
            # Values of the sampling come with the rollouts.
            unread = np.zeros(len(response), dtype=np.float32)
            yield TrainSequence(prompts[group], response, mask, unread, temperature=float(self.temperatures[group]))


def gather_batch(plan: TrainPlan, engine: Engine, own: Sequence[TrainSequence]) -> BatchSequences | None:
    """All sequences of a batch from those of an engine's ranks; collective.

    Args:
        plan: of the batch.
        engine: whose ranks have the sequences.
        own: those of this rank, in the order of `TrainPlan.members_of`.

    Returns:
        In the leading process; None in the others.
    """
    counts = torch.tensor([len(sequence.response_ids) for sequence in own], dtype=torch.int64)
    ids = np.concatenate([s.response_ids for s in own]) if own else np.zeros(0, np.int32)
    masks = np.concatenate([s.response_mask for s in own]) if own else np.zeros(0, np.uint8)
    gathered = [
        _gathered(engine, values)
        for values in (counts, torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(masks.astype(np.uint8)))
    ]
    if not engine.layout.leads:
        return None
    lengths, all_ids, all_masks = gathered
    order = plan.rank_order(engine.layout)
    # From the order of the ranks to that of the plan.
    back = np.argsort(order)
    parts = [_split(values, lengths) for values in (all_ids, all_masks)]
    response_ids, response_masks = (np.concatenate([part[index] for index in back]) for part in parts)
    minibatches = np.zeros(len(plan.members), dtype=np.int64)
    for minibatch in range(plan.minibatches):
        minibatches[plan.rank_order(engine.layout, [minibatch])] = minibatch
    prompts = [prompt.array() for prompt in plan.prompts]
    return BatchSequences(
        version=np.array([plan.version], dtype=np.int64),
        prompt_ids=np.concatenate(prompts).astype(np.int32),
        prompt_lengths=np.array([len(prompt) for prompt in prompts], dtype=np.int64),
        temperatures=np.array([prompt.temperature for prompt in plan.prompts], dtype=np.float32),
        groups=np.array([member.prompt for member in plan.members], dtype=np.int64),
        minibatches=minibatches,
        response_ids=response_ids,
        response_masks=response_masks,
        response_lengths=lengths[back],
    )


def _gathered(engine: Engine, values: Tensor) -> NDArray[Any]:
    """The values of all ranks, one after another."""
    found: NDArray[Any] = torch.cat(engine.gather(values.to(engine.device))).cpu().numpy()
    return found


def _split(values: NDArray[Any], lengths: NDArray[np.int64]) -> list[NDArray[Any]]:
    """Arrays of these lengths, one after another."""
    return np.split(values, lengths.cumsum()[:-1]) if len(lengths) else []
