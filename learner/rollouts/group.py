"""A group as the learner holds it: leased, its payloads decoded where they came with the lease."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollmesh.buffer.client.client import Lease
from rollmesh.learner.algorithms.types import Group
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory import payload_codec
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.protos import buffer_pb2, trajectory_pb2

_Meta = trajectory_pb2.MemberMeta


@dataclass(frozen=True, slots=True, eq=False)
class SampledMember:
    """A sampled response of a leased group.

    Attributes:
        meta: its metadata, as the buffer sent it.
        scored: whether it has a reward, and so a payload.
        truncated: whether the token budget ended it.
        trajectory: its payload, decoded; None without a reward, and where the rank that trains it fetches it.
        reward_record: fields of `RewardRecord`, of a response that is kept for people; empty where there are none.
    """

    meta: trajectory_pb2.MemberMeta
    scored: bool
    truncated: bool
    trajectory: Trajectory | None = None
    reward_record: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class SampledGroup:
    """A leased group.

    Its members are those that can be trained. Greedy responses, which only give a baseline, are apart.

    Attributes:
        leased: the lease, the prompt task and all metadata, as the buffer sent them.
        prompt_ids: int32 [P].
        members: the sampled responses.
        baseline_reward: reward of the greedy response; None without one that is scored.
    """

    leased: buffer_pb2.LeasedGroup
    prompt_ids: NDArray[np.int32]
    members: Sequence[SampledMember]
    baseline_reward: float | None = None

    @classmethod
    def of(
        cls,
        leased: buffer_pb2.LeasedGroup,
        prompt_ids: NDArray[np.int32],
        trajectories: Mapping[int, Trajectory] = MappingProxyType({}),
    ) -> SampledGroup:
        """Builds a group from its metadata and the trajectories that are here, by member."""
        sampled, greedy = _split_greedy(leased)
        members = [
            SampledMember(meta, is_scored(meta), is_truncated(meta), trajectories.get(meta.member)) for meta in sampled
        ]
        baseline = next((meta.reward for meta in greedy if is_scored(meta)), None)
        return cls(leased, prompt_ids, members, baseline)

    @property
    def group_id(self) -> str:
        return self.leased.group_id

    @property
    def lease(self) -> buffer_pb2.LeaseRef:
        return buffer_pb2.LeaseRef(group_id=self.leased.group_id, lease_id=self.leased.lease_id)

    @property
    def key(self) -> Lease:
        """Group id and lease id."""
        return Lease.of(self.leased)

    @property
    def scored_members(self) -> list[SampledMember]:
        """The members that are trained."""
        return [member for member in self.members if member.scored]

    @cached_property
    def algorithm_view(self) -> Group:
        """The group as algorithms see it, built once; lengths count response tokens, as the metadata states them."""
        metas = [member.meta for member in self.members]
        names = sorted({name for meta in metas for name in meta.components})
        return Group(
            rewards=torch.tensor([meta.reward for meta in metas], dtype=torch.float32),
            scored=torch.tensor([member.scored for member in self.members], dtype=torch.bool),
            lengths=torch.tensor([meta.response_tokens for meta in metas], dtype=torch.int64),
            truncated=torch.tensor([member.truncated for member in self.members], dtype=torch.bool),
            components={
                name: torch.tensor([meta.components.get(name, 0.0) for meta in metas], dtype=torch.float32)
                for name in names
            },
            baseline_reward=self.baseline_reward,
        )


def _split_greedy(leased: buffer_pb2.LeasedGroup) -> tuple[Sequence[_Meta], Sequence[_Meta]]:
    """The sampled members, and the greedy ones, which have the highest indices."""
    task = leased.task
    if not task.greedy:
        return leased.members, ()
    first = task.n - task.greedy
    sampled = [meta for meta in leased.members if meta.member < first]
    return sampled, [meta for meta in leased.members if meta.member >= first]


def is_scored(member: trajectory_pb2.MemberMeta) -> bool:
    """True where a member has a reward, and so a payload."""
    return bool(member.outcome == trajectory_pb2.OUTCOME_SCORED)


def is_truncated(member: trajectory_pb2.MemberMeta) -> bool:
    """True where the token budget ended the response."""
    return bool(member.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH)


def unsent_members(leased: buffer_pb2.LeasedGroup) -> list[int]:
    """Members with a payload too large to come with the lease: the learner fetches it."""
    return [meta.member for meta, pieces in zip(leased.members, leased.pieces, strict=False) if pieces]


def decode_group(
    leased: buffer_pb2.LeasedGroup,
    payloads: Sequence[bytes | memoryview] | None,
    fetched: Mapping[int, bytes] = MappingProxyType({}),
) -> SampledGroup:
    """Decodes a leased group; its arrays are views of the payloads.

    Args:
        leased: as the buffer sent it.
        payloads: by position in `leased.members`; None where the ranks open them that train them.
        fetched: payloads by member of those that were left out.

    Raises:
        PayloadError: a payload is malformed, missing, or contradicts its metadata; the group cannot be trained.
    """
    if not leased.task.prompt_ids:
        raise PayloadError("task.prompt_ids", f"group {leased.group_id} has no prompt")
    prompt_ids = np.frombuffer(leased.task.prompt_ids, dtype="<i4")
    if not any(is_scored(member) for member in leased.members):
        raise PayloadError("members", f"group {leased.group_id} has no scored member")
    if payloads is None:
        return SampledGroup.of(leased, prompt_ids)
    if len(payloads) != len(leased.members):
        raise PayloadError("payloads", f"{len(payloads)} for {len(leased.members)} members")
    found = {meta.member: data for meta, data in zip(leased.members, payloads, strict=True)}
    found.update(fetched)
    sampled, _ = _split_greedy(leased)
    trajectories = {
        meta.member: payload_codec.decode(found[meta.member], tokens=meta.response_tokens)
        for meta in sampled
        if is_scored(meta)
    }
    return SampledGroup.of(leased, prompt_ids, trajectories)
