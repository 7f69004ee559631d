"""Where a rank gets the trajectories of its share of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from buffer.client import BufferClient
from learner.groups import SampledGroup
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
        opened = [trajectory.decode(data) for data in self._bridge.call(self._fetch(members), self._timeout_s)]
        for member, found in zip(members, opened, strict=True):
            if len(found.response_ids) != member.response_tokens:
                raise PayloadError(
                    "response_tokens",
                    f"{member.group_id}/{member.member}: metadata says {member.response_tokens}, "
                    f"the payload has {len(found.response_ids)}",
                )
        return opened

    async def _fetch(self, members: Sequence[PlannedMember]) -> list[bytes]:
        refs = [buffer_pb2.MemberRef(group_id=member.group_id, member=member.member) for member in members]
        return [data async for data in self._client.fetch("train", refs)]
