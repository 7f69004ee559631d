"""Lists the holders of a table's groups, and since when they hold them."""

from __future__ import annotations

from rollmesh.buffer.protocol.leases import LEARNER
from rollmesh.buffer.server.front_context import FrontContext
from rollmesh.buffer.server.membership import read_members
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import membership_pb2


async def list_holders(front: FrontContext, table: str, limit: int) -> pb.HoldersResponse:
    """The holders of groups of a table, with their last heartbeats; those that have held one for longest first."""
    found, learner = await front.store.holders(table)
    members = {member.member_id: member for member in (await read_members(front))[0]}
    answer = pb.HoldersResponse(total=len(found))
    for name, groups, oldest, held_ms, lease_ms, is_open in sorted(found, key=lambda item: -int(item[3])):
        if limit and len(answer.holders) == limit:
            break
        holder = name.decode()
        member_id = learner or LEARNER if holder == LEARNER else holder
        member = members.get(member_id, membership_pb2.Member())
        answer.holders.add(
            member_id=member_id,
            role="learner" if holder == LEARNER else "generator",
            address=member.address,
            groups=groups,
            oldest_group_id=oldest.decode(),
            held_ms=held_ms,
            heartbeat_age_ms=member.heartbeat_age_ms,
            lease_ms=lease_ms,
            stream_open=bool(is_open),
            waiting_reason=member.waiting_reason,
        )
    return answer
