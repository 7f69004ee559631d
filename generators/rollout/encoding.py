"""Members in the form in which the buffer stores them."""

from __future__ import annotations

from rollmesh.buffer.client.client import PendingWrite
from rollmesh.generators.rollout.active_group import ActiveGroup
from rollmesh.protos import buffer_pb2, trajectory_pb2

FINISH_REASONS = {
    "stop": trajectory_pb2.FINISH_REASON_STOP,
    "length": trajectory_pb2.FINISH_REASON_LENGTH,
    "aborted": trajectory_pb2.FINISH_REASON_ABORTED,
}


def member_write(
    group: ActiveGroup, meta: trajectory_pb2.MemberMeta, payload: bytes, *, draft: bool = False
) -> PendingWrite:
    """The write of a member, under the lease by which its group is held."""
    head = buffer_pb2.MemberWrite(
        group_id=group.group_id,
        lease_id=group.grant.lease_id,
        attempt=group.grant.attempt,
        meta=meta,
        draft=draft,
    )
    return PendingWrite(head, payload)
