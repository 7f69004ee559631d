"""The plan of one batch, made by rank 0 on metadata and sent to all ranks.

`learner.batching` divides the batch. This module names the trajectories and carries the plan over the wire (msgpack).
The plan is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgpack
import numpy as np
from numpy.typing import NDArray

from rollmesh.learner.batching.partition import sequence_cost
from rollmesh.learner.batching.plan import BatchPlan, PlanItem, SequenceCost, plan_batch
from rollmesh.learner.batching.types import Packing
from rollmesh.learner.engines.layout import Layout
from rollmesh.learner.rollouts.group import SampledGroup
from rollmesh.mesh.trajectory.lineage import Lineage
from rollmesh.mesh.trajectory.routing import PROMPT_EXPERTS, ROUTED_EXPERTS
from rollmesh.protos import trajectory_pb2


@dataclass(frozen=True, slots=True)
class PlannedMember:
    """A response to train.

    Attributes:
        prompt: index in `TrainPlan.prompts`, which is its group's.
        group_id, member: name the payload.
        response_tokens: length of the response.
        reward: of the whole response.
        truncated: the token budget ended it.
        components: reward components, in the order of `TrainPlan.components`.
        experts: entry of the side data with the experts of its tokens, serialized; empty: there is none.
    """

    prompt: int
    group_id: str
    member: int
    response_tokens: int
    reward: float
    truncated: bool
    components: Sequence[float] = ()
    experts: bytes = b""


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """The prompt and the values that the members of a group share.

    Attributes:
        ids: token ids, int32 little-endian.
        temperature: of the sampling.
        baseline_reward: of the group's greedy response; None without one.
        probability: with which the buffer drew the group; 1 where its order does not draw.
        experts: entry of the side data with the experts of the prompt's tokens, serialized; empty: there is none.
        experts_of: the member that has it.
        images: digests of the prompt's images, whose placeholders are among the ids.
        seen: digest of the tokens that the model sees of a prompt with images.
        data_source: name of the prompt's data source.
    """

    ids: bytes
    temperature: float
    baseline_reward: float | None = None
    probability: float = 1.0
    experts: bytes = b""
    experts_of: int = 0
    images: Sequence[str] = ()
    seen: str = ""
    data_source: str = ""

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
        divisions: minibatches, ranks and micro-batches, as indices of `members`; by the number of data-parallel ranks,
            as models of several layouts may have several. Their minibatches have the same members.
        packing: how micro-batches are computed.
        end: last version of the run, as far as is known: the end of schedules.
    """

    version: int
    lineage: Lineage
    prompts: Sequence[PlannedPrompt]
    members: Sequence[PlannedMember]
    components: Sequence[str]
    divisions: Mapping[int, BatchPlan]
    packing: Packing = Packing.SHARED
    end: int = 0

    @property
    def minibatches(self) -> int:
        """Optimizer steps per pass."""
        return len(next(iter(self.divisions.values())).minibatches)

    def members_of(self, layout: Layout, minibatches: Sequence[int] | None = None) -> list[int]:
        """The share of a data-parallel rank: minibatch after minibatch, in the order of its micro-batches.

        Args:
            layout: of the model; of some process of the rank.
            minibatches: None: all.
        """
        return self._members(layout.dp_size, layout.dp_rank, minibatches)

    def rank_order(self, layout: Layout, minibatches: Sequence[int] | None = None) -> NDArray[np.int64]:
        """The sequences in the order in which the data-parallel ranks, one after another, hold them."""
        ranks = range(layout.dp_size)
        found = [member for rank in ranks for member in self._members(layout.dp_size, rank, minibatches)]
        return np.array(found, dtype=np.int64)

    def _members(self, dp_size: int, dp_rank: int, minibatches: Sequence[int] | None) -> list[int]:
        division = self.divisions[dp_size].minibatches
        chosen = range(len(division)) if minibatches is None else minibatches
        return [member for minibatch in chosen for micro in division[minibatch][dp_rank] for member in micro]

    def to_bytes(self) -> bytes:
        """The plan as msgpack, for the other ranks."""
        packed: bytes = msgpack.packb(
            {
                "version": self.version,
                "lineage": self.lineage.to_wire(),
                "prompts": [
                    [
                        p.ids,
                        p.temperature,
                        p.baseline_reward,
                        p.probability,
                        p.experts,
                        p.experts_of,
                        list(p.images),
                        p.seen,
                        p.data_source,
                    ]
                    for p in self.prompts
                ],
                "members": [
                    [m.prompt, m.group_id, m.member, m.response_tokens, m.reward, m.truncated, m.components, m.experts]
                    for m in self.members
                ],
                "components": self.components,
                "divisions": [division.minibatches for division in self.divisions.values()],
                "packing": self.packing.value,
                "end": self.end,
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
            divisions={len(minibatches[0]): BatchPlan(_tuples(minibatches)) for minibatches in wire["divisions"]},
            packing=Packing(wire["packing"]),
            end=wire["end"],
        )


def plan_training(
    groups: Sequence[SampledGroup],
    *,
    version: int,
    lineage: Lineage,
    token_budget: int,
    minibatches: int,
    dp_sizes: Collection[int] = (1,),
    packing: Packing = Packing.SHARED,
    cost: SequenceCost = sequence_cost,
    shares: Sequence[float] | None = None,
    end: int = 0,
) -> TrainPlan:
    """Plans a batch.

    Args:
        groups: the batch.
        version: policy version that is trained.
        lineage: of this learner.
        token_budget: tokens per micro-batch.
        minibatches: optimizer steps per pass.
        dp_sizes: numbers of data-parallel ranks of the models, at least one.
        packing: that all models of the run can take.
        cost: of sequences, over all models.
        shares: per group, of its cost that is expected to be computed; None: all of it.
        end: see `TrainPlan`.
    """
    names = sorted({name for group in groups for member in group.members for name in member.meta.components})
    prompts, members, items = [], [], []
    for index, group in enumerate(groups):
        task = group.leased.task
        holder = next((meta for meta in group.leased.members if _entry(meta, PROMPT_EXPERTS)), None)
        prompts.append(
            PlannedPrompt(
                task.prompt_ids,
                task.sampling.temperature,
                group.baseline_reward,
                group.leased.probability or 1.0,
                b"" if holder is None else _entry(holder, PROMPT_EXPERTS),
                0 if holder is None else holder.member,
                list(task.image_digests),
                task.seen.digest,
                task.data_source,
            )
        )
        share = 1.0 if shares is None else shares[index]
        for member in group.scored_members:
            meta = member.meta
            components = [meta.components.get(name, 0.0) for name in names]
            members.append(
                PlannedMember(
                    index,
                    group.group_id,
                    meta.member,
                    meta.response_tokens,
                    meta.reward,
                    member.truncated,
                    components,
                    _entry(meta, ROUTED_EXPERTS),
                )
            )
            tokens = task.seen.tokens or len(group.prompt_ids)
            items.append(PlanItem(index, tokens, meta.response_tokens, share))
    divisions = {
        ranks: plan_batch(
            items, token_budget=token_budget, ranks=ranks, minibatches=minibatches, packing=packing, cost=cost
        )
        for ranks in sorted(dp_sizes)
    }
    return TrainPlan(version, lineage, prompts, members, names, divisions, packing, end)


def _entry(meta: trajectory_pb2.MemberMeta, name: str) -> bytes:
    """An entry of a member's side data, serialized; empty: there is none."""
    entry = next((entry for entry in meta.side if entry.name == name), None)
    serialized: bytes = b"" if entry is None else entry.SerializeToString()
    return serialized


def _tuples(
    minibatches: Sequence[Sequence[Sequence[Sequence[int]]]],
) -> tuple[tuple[tuple[tuple[int, ...], ...], ...], ...]:
    return tuple(tuple(tuple(tuple(micro) for micro in rank) for rank in minibatch) for minibatch in minibatches)
