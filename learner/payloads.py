"""Where a rank gets the trajectories of its share of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from buffer.client import BufferClient
from learner.groups import SampledGroup, left_out
from learner.plan import PlannedMember
from mesh import trajectory
from mesh.errors import PayloadError
from mesh.service import AsyncBridge
from mesh.trajectory import Trajectory
from protos import buffer_pb2


class Payloads(Protocol):
    """Gives trajectories by name."""

    def get(self, members: Sequence[PlannedMember]) -> list[Trajectory]:
        """The trajectories of `members`, in their order.

        Raises:
            PayloadError: one is malformed or gone.
        """
        ...


class HeldPayloads:
    """Trajectories that came with the leases (one rank)."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], Trajectory] = {}

    def hold(self, groups: Sequence[SampledGroup]) -> None:
        """Takes the groups of a batch in place of those of the batch before."""
        self._held = {
            (group.group_id, meta.member): found
            for group in groups
            for meta, found in zip(group.members, group.trajectories, strict=True)
            if found is not None
        }

    def get(self, members: Sequence[PlannedMember]) -> list[Trajectory]:
        return [self._held[member.group_id, member.member] for member in members]


async def fetch_left_out(client: BufferClient, table: str, leased: buffer_pb2.LeasedGroup) -> dict[int, bytes]:
    """Payloads, by member, that are too large to come with the lease.

    Raises:
        DataError: the group has ended meanwhile.
        UnreachableError: the buffer stayed away.
    """
    members = left_out(leased)
    refs = [buffer_pb2.MemberRef(group_id=leased.group_id, member=member) for member in members]
    fetched = [data async for data in client.fetch(table, refs)]
    return dict(zip(members, fetched, strict=True))


class FetchedPayloads:
    """Trajectories fetched from the buffer by the rank that trains them.

    Args:
        bridge: the event loop of this rank.
        client: of the buffer.
        timeout_s: deadline of one fetch.
    """

    def __init__(self, bridge: AsyncBridge, client: BufferClient, *, timeout_s: float) -> None:
        self._bridge = bridge
        self._client = client
        self._timeout_s = timeout_s

    def get(self, members: Sequence[PlannedMember]) -> list[Trajectory]:
        if not members:
            return []
        return self._bridge.call(self._fetch(members), self._timeout_s)

    async def _fetch(self, members: Sequence[PlannedMember]) -> list[Trajectory]:
        """Opens each payload as soon as it is there."""
        refs = [buffer_pb2.MemberRef(group_id=member.group_id, member=member.member) for member in members]
        opened: list[Trajectory] = []
        async for data in self._client.fetch("train", refs):
            member = members[len(opened)]
            try:
                opened.append(trajectory.decode(data, tokens=member.response_tokens))
            except PayloadError as error:
                what = error.message.removeprefix(f"{error.field}: ")
                raise PayloadError(error.field, f"{what} (group {member.group_id}, member {member.member})") from error
        return opened
