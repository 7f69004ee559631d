"""A group as the learner holds it: leased, its payloads decoded where they came along."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mesh import trajectory
from mesh.errors import PayloadError
from mesh.trajectory import Trajectory
from protos import buffer_pb2, trajectory_pb2


@dataclass(frozen=True, slots=True, eq=False)
class SampledGroup:
    """One leased group.

    Attributes:
        leased: the lease, the prompt task and the members' metadata, as the buffer sent them (payloads dropped).
        prompt_ids: int32 [P].
        trajectories: by position in `leased.members`; None for members that are not scored, and for all members
            where the payloads are fetched by the ranks that train them.
        scored: by position: whether the member has a reward.
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
    def members(self) -> Sequence[trajectory_pb2.MemberMeta]:
        return self.leased.members


def is_scored(member: trajectory_pb2.MemberMeta) -> bool:
    """Whether a member has a reward, and so a payload."""
    return bool(member.outcome == trajectory_pb2.OUTCOME_SCORED)


def open_group(leased: buffer_pb2.LeasedGroup, *, with_payloads: bool) -> SampledGroup:
    """Decodes a leased group; empties `leased.payloads`.

    Raises:
        PayloadError: a payload is malformed, missing, or contradicts its metadata; the group cannot be trained.
    """
    if not leased.task.prompt_ids:
        raise PayloadError("task.prompt_ids", f"group {leased.group_id} has no prompt")
    prompt_ids = np.frombuffer(leased.task.prompt_ids, dtype="<i4")
    scored = [is_scored(member) for member in leased.members]
    if not any(scored):
        raise PayloadError("members", f"group {leased.group_id} has no scored member")
    opened: list[Trajectory | None] = [None] * len(leased.members)
    if with_payloads:
        if len(leased.payloads) != len(leased.members):
            raise PayloadError("payloads", f"{len(leased.payloads)} for {len(leased.members)} members")
        for position, member in enumerate(leased.members):
            if scored[position]:
                opened[position] = open_member(member, leased.payloads[position])
        del leased.payloads[:]
    return SampledGroup(leased, prompt_ids, opened, scored)


def open_member(member: trajectory_pb2.MemberMeta, payload: bytes) -> Trajectory:
    """Decodes one member's payload.

    Raises:
        PayloadError: malformed, or of another length than the metadata says.
    """
    opened = trajectory.decode(payload)
    if len(opened.response_ids) != member.response_tokens:
        raise PayloadError(
            "response_tokens", f"metadata says {member.response_tokens}, the payload has {len(opened.response_ids)}"
        )
    return opened
