"""The plan of one batch, made by rank 0 on metadata and sent to all ranks.

`learner.batching` divides the batch. This module names the trajectories and carries the plan over the wire (msgpack).
The plan is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgpack
import numpy as np
from numpy.typing import NDArray

from rollmesh.learner.batching.plan import BatchPlan, PlanItem, plan_batch
from rollmesh.learner.batching.types import Packing
from rollmesh.learner.rollouts.group import SampledGroup
from rollmesh.mesh.trajectory.lineage import Lineage


@dataclass(frozen=True, slots=True)
class PlannedMember:
    """One response to train.

    Attributes:
        prompt: index in `TrainPlan.prompts`, which is its group's.
        group_id, member: name the payload.
        response_tokens: length of the response.
        reward: of the whole response.
        truncated: the token budget ended it.
        components: reward components, in the order of `TrainPlan.components`.
    """

    prompt: int
    group_id: str
    member: int
    response_tokens: int
    reward: float
    truncated: bool
    components: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """The prompt and the values that the members of a group share.

    Attributes:
        ids: token ids, int32 little-endian.
        temperature: of the sampling.
        baseline_reward: of the group's greedy response; None without one.
        probability: with which the buffer drew the group; 1 where its order does not draw.
    """

    ids: bytes
    temperature: float
    baseline_reward: float | None = None
    probability: float = 1.0

    def array(self) -> NDArray[np.int32]:
        """int32 [P]."""
        return np.frombuffer(self.ids, dtype="<i4")


@dataclass(frozen=True, slots=True)
class TrainPlan:
    """The plan of one batch.

    Attributes:
        version: policy version that is trained.
        lineage: gives the staleness of tokens.
        prompts: of the groups.
        members: all responses that are trained, those of a group side by side.
        components: names of the reward components.
        division: minibatches, ranks and micro-batches, as indices of `members`.
        packing: how micro-batches are computed.
    """

    version: int
    lineage: Lineage
    prompts: Sequence[PlannedPrompt]
    members: Sequence[PlannedMember]
    components: Sequence[str]
    division: BatchPlan
    packing: Packing = Packing.SHARED

    def to_bytes(self) -> bytes:
        """The plan as msgpack, for the other ranks."""
        packed: bytes = msgpack.packb(
            {
                "version": self.version,
                "lineage": self.lineage.to_wire(),
                "prompts": [[p.ids, p.temperature, p.baseline_reward, p.probability] for p in self.prompts],
                "members": [
                    [m.prompt, m.group_id, m.member, m.response_tokens, m.reward, m.truncated, m.components]
                    for m in self.members
                ],
                "components": self.components,
                "division": self.division.minibatches,
                "packing": self.packing.value,
            }
        )
        return packed

    @classmethod
    def from_bytes(cls, data: bytes) -> TrainPlan:
        """Inverse of `to_bytes`."""
        wire = msgpack.unpackb(data)
        return cls(
            version=wire["version"],
            lineage=Lineage.from_wire(wire["lineage"]),
            prompts=[PlannedPrompt(*prompt) for prompt in wire["prompts"]],
            members=[PlannedMember(*member) for member in wire["members"]],
            components=wire["components"],
            division=BatchPlan(
                tuple(
                    tuple(tuple(tuple(micro) for micro in rank) for rank in minibatch) for minibatch in wire["division"]
                )
            ),
            packing=Packing(wire["packing"]),
        )


def plan_training(
    groups: Sequence[SampledGroup],
    *,
    version: int,
    lineage: Lineage,
    token_budget: int,
    minibatches: int,
    ranks: int,
    packing: Packing = Packing.SHARED,
    shares: Sequence[float] | None = None,
) -> TrainPlan:
    """Plans a batch.

    Args:
        groups: the batch.
        version: policy version that is trained.
        lineage: of this learner.
        token_budget: tokens per micro-batch.
        minibatches: optimizer steps per pass.
        ranks: data-parallel ranks.
        packing: that all models of the run can take.
        shares: per group, of its cost that is expected to be computed; None: all of it.
    """
    names = sorted({name for group in groups for member in group.members for name in member.meta.components})
    prompts, members, items = [], [], []
    for index, group in enumerate(groups):
        task = group.leased.task
        prompts.append(
            PlannedPrompt(
                task.prompt_ids, task.sampling.temperature, group.baseline_reward, group.leased.probability or 1.0
            )
        )
        share = 1.0 if shares is None else shares[index]
        for member in group.scored_members:
            meta = member.meta
            components = [meta.components.get(name, 0.0) for name in names]
            members.append(
                PlannedMember(
                    index, group.group_id, meta.member, meta.response_tokens, meta.reward, member.truncated, components
                )
            )
            items.append(PlanItem(index, len(group.prompt_ids), meta.response_tokens, share))
    division = plan_batch(items, token_budget=token_budget, ranks=ranks, minibatches=minibatches, packing=packing)
    return TrainPlan(version, lineage, prompts, members, names, division, packing)
