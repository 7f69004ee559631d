"""Payloads of a leased group that are too large to come with its lease."""

from __future__ import annotations

from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.rollouts.group import unsent_members
from rollmesh.protos import buffer_pb2


async def fetch_unsent(client: BufferClient, table: str, leased: buffer_pb2.LeasedGroup) -> dict[int, bytes]:
    """Payloads, by member, that are too large to come with the lease.

    Raises:
        DataError: the group has ended meanwhile.
        UnreachableError: the buffer stayed away.
    """
    members = unsent_members(leased)
    refs = [buffer_pb2.MemberRef(group_id=leased.group_id, member=member) for member in members]
    fetched = [data async for data in client.fetch(table, refs)]
    return dict(zip(members, fetched, strict=True))
