"""A group as the learner holds it: leased, its payloads decoded where they came along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from rollmesh.buffer.client.client import Lease
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory import payload_codec
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.protos import buffer_pb2, trajectory_pb2


@dataclass(frozen=True, slots=True, eq=False)
class SampledGroup:
    """One leased group.

    Its members are those that can be trained. Greedy responses, which only give a baseline, are apart.

    Attributes:
        leased: the lease, the prompt task and all metadata, as the buffer sent them.
        prompt_ids: int32 [P].
        trajectories: by position in `members`; None for members that are not scored, and for all members where the
            payloads are fetched by the ranks that train them.
        scored: by position in `members`: whether the member has a reward.
    """

    leased: buffer_pb2.LeasedGroup
    prompt_ids: NDArray[np.int32]
    trajectories: Sequence[Trajectory | None]
    scored: Sequence[bool]

    @property
    def group_id(self) -> str:
        return self.leased.group_id

    @property
    def lease(self) -> buffer_pb2.LeaseRef:
        return buffer_pb2.LeaseRef(group_id=self.leased.group_id, lease_id=self.leased.lease_id)

    @property
    def key(self) -> Lease:
        """Group id and lease id."""
        return (self.leased.group_id, self.leased.lease_id)

    @property
    def members(self) -> Sequence[trajectory_pb2.MemberMeta]:
        """Metadata of the sampled responses."""
        return sampled_members(self.leased)

    @property
    def baseline_reward(self) -> float | None:
        """Reward of the greedy response; None without one that is scored."""
        task = self.leased.task
        if not task.greedy:
            return None
        greedy = (member for member in self.leased.members if member.member >= task.n - task.greedy)
        return next((member.reward for member in greedy if is_scored(member)), None)


def sampled_members(leased: buffer_pb2.LeasedGroup) -> Sequence[trajectory_pb2.MemberMeta]:
    """Members without the greedy ones, which have the highest indices."""
    task = leased.task
    if not task.greedy:
        return leased.members
    return [member for member in leased.members if member.member < task.n - task.greedy]


def is_scored(member: trajectory_pb2.MemberMeta) -> bool:
    """Whether a member has a reward, and so a payload."""
    return bool(member.outcome == trajectory_pb2.OUTCOME_SCORED)


def unsent_members(leased: buffer_pb2.LeasedGroup) -> list[int]:
    """Members whose payload is too large to come with the lease: it has to be fetched."""
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
    members = sampled_members(leased)
    scored = [is_scored(member) for member in members]
    opened: list[Trajectory | None] = [None] * len(members)
    if payloads is not None:
        if len(payloads) != len(leased.members):
            raise PayloadError("payloads", f"{len(payloads)} for {len(leased.members)} members")
        found = {meta.member: data for meta, data in zip(leased.members, payloads, strict=True)}
        found.update(fetched)
        opened = [
            decode_member(member, found[member.member]) if has_reward else None
            for member, has_reward in zip(members, scored, strict=True)
        ]
    return SampledGroup(leased, prompt_ids, opened, scored)


def decode_member(member: trajectory_pb2.MemberMeta, payload: bytes | memoryview) -> Trajectory:
    """Decodes one member's payload.

    Raises:
        PayloadError: malformed, or of another length than the metadata says.
    """
    return payload_codec.decode(payload, tokens=member.response_tokens)
