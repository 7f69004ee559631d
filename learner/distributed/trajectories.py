"""Sources of the trajectories of a rank's share of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

from rollmesh.buffer.client.client import BufferClient
from rollmesh.learner.distributed.train_plan import PlannedMember
from rollmesh.learner.rollouts.group import SampledGroup
from rollmesh.mesh.errors import DataError, PayloadError
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.tables import TRAIN
from rollmesh.mesh.trajectory import payload_codec
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.protos import buffer_pb2

TrajectoryOrError = Trajectory | PayloadError | DataError
"""A trajectory, or the reason for its absence: it is malformed, or its group has ended."""


class TrajectorySource(Protocol):
    """Gives trajectories by name."""

    def get(self, members: Sequence[PlannedMember]) -> Sequence[TrajectoryOrError]:
        """The trajectories of `members`, in their order."""
        ...


class InlineTrajectories:
    """Trajectories that came with the leases (one rank)."""

    def __init__(self) -> None:
        self._trajectories: dict[tuple[str, int], Trajectory] = {}

    def set_batch(self, groups: Sequence[SampledGroup]) -> None:
        """Replaces the former batch's groups by those of a batch."""
        self._trajectories = {
            (group.group_id, member.meta.member): member.trajectory
            for group in groups
            for member in group.members
            if member.trajectory is not None
        }

    def get(self, members: Sequence[PlannedMember]) -> Sequence[TrajectoryOrError]:
        return [self._trajectories[member.group_id, member.member] for member in members]


class FetchedTrajectories:
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

    def get(self, members: Sequence[PlannedMember]) -> Sequence[TrajectoryOrError]:
        """The trajectories of `members`, in their order.

        Raises:
            UnreachableError: the buffer stayed away.
        """
        return self._bridge.call(self._get(members), self._timeout_s) if members else []

    async def _get(self, members: Sequence[PlannedMember]) -> Sequence[TrajectoryOrError]:
        found: list[TrajectoryOrError] = []
        try:
            await self._fetch(members, found)
        except DataError:
            # A call ends with the first group that is gone; only its message names the group.
            for _, group in groupby(members[len(found) :], key=lambda member: member.group_id):
                of_group = list(group)
                opened: list[TrajectoryOrError] = []
                try:
                    await self._fetch(of_group, opened)
                except DataError as error:
                    opened = [error] * len(of_group)
                found += opened
        return found

    async def _fetch(self, members: Sequence[PlannedMember], found: list[TrajectoryOrError]) -> None:
        """Opens each payload as soon as it is there."""
        refs = [buffer_pb2.MemberRef(group_id=member.group_id, member=member.member) for member in members]
        waiting = iter(members)
        async for data in self._client.fetch(TRAIN, refs):
            try:
                found.append(payload_codec.decode(data, tokens=next(waiting).response_tokens))
            except PayloadError as error:
                found.append(error)
