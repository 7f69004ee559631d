"""The connection to the learner, which may move: after a restart it has another address.

Invariant: there is at most one connection in use, to the learner that the mesh named last. When it names another, the
former connection is marked `replaced` and closed. A learner that the mesh misses for a while keeps its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial

import grpc

from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import UnauthenticatedError
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.runtime.background_tasks import BackgroundTasks, log_errors
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import weights_pb2_grpc

log = logging.getLogger(__name__)
_REFRESH_INTERVAL_S = 0.25


def is_channel_closed(error: BaseException) -> bool:
    """True where a call ended because its channel was closed for another learner's.

    gRPC raises `CancelledError` then, as if the calling task had been cancelled; the task's own count of requests
    identifies a real cancellation.
    """
    if isinstance(error, grpc.aio.UsageError):
        return True
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and not (task is not None and task.cancelling())


class LearnerConnection:
    """A channel to one learner, and further ones for concurrent transfers.

    Args:
        member_id, address: of that learner.
        connect: opens a channel to it.

    Attributes:
        member_id, address: of that learner.
        weights: stub of its Weights service.
        replaced: set when the mesh has named another learner.
    """

    def __init__(self, member_id: str, address: str, connect: Callable[[], grpc.aio.Channel]) -> None:
        self.member_id = member_id
        self.address = address
        self._connect = connect
        self._channels = [connect()]
        self.weights = weights_pb2_grpc.WeightsStub(self._channels[0])
        self.replaced = asyncio.Event()

    def transfer_channels(self, count: int) -> Sequence[grpc.aio.Channel]:
        """`count` channels in addition to the one for all other calls: bytes do not delay short calls."""
        while not self.replaced.is_set() and len(self._channels) <= count:
            self._channels.append(self._connect())
        return self._channels[1 : count + 1] or self._channels[:1]

    async def replaced_within(self, timeout_s: float) -> bool:
        """Waits for `replaced`, at most `timeout_s`; True if it is set."""
        try:
            await asyncio.wait_for(self.replaced.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Ends every call on it."""
        self.replaced.set()
        for channel in self._channels:
            await channel.close()


class LearnerDirectory:
    """Follows the membership's view of the learner."""

    def __init__(self, agent: MembershipAgent, security: SecuritySection, *, max_message_mb: int = 64) -> None:
        self._agent = agent
        self._security = security
        self._max_message_mb = max_message_mb
        self._known = asyncio.Event()
        self._current: LearnerConnection | None = None
        self._closing = BackgroundTasks(log_errors(log))
        agent.on_change(self._on_mesh_change)
        self._on_mesh_change()

    @property
    def policy_in_force(self) -> PolicyVersion | None:
        """The newest published version, as the mesh knows it."""
        return self._agent.policy

    @property
    def learner_is_known(self) -> bool:
        """True while the mesh names a learner."""
        return self._agent.learner is not None

    async def connection(self) -> LearnerConnection:
        """The connection to use now; waits until the mesh has named a learner."""
        while self._current is None:
            # Heartbeats are seconds apart; at the start of a run all generators wait for this.
            await self.refresh()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._known.wait(), _REFRESH_INTERVAL_S)
        return self._current

    async def refresh(self) -> None:
        """Asks the mesh now, ahead of the next heartbeat."""
        try:
            await self._agent.heartbeat()
        except (grpc.aio.AioRpcError, UnauthenticatedError) as error:
            # The heartbeats, which meet the same, judge it.
            log.debug("the mesh does not say who the learner is: %s", error)

    async def close(self) -> None:
        """Closes all open channels."""
        if self._current is not None:
            await self._current.close()
        await self._closing.drain()

    def _on_mesh_change(self) -> None:
        learner, former = self._agent.learner, self._current
        if learner is None or not learner.address:
            return
        if former is not None and (former.member_id, former.address) == (learner.member_id, learner.address):
            return
        identity = Identity(Role.GENERATOR, self._agent.member_id)
        connect = partial(open_channel, learner.address, self._security, identity, max_message_mb=self._max_message_mb)
        self._current = LearnerConnection(learner.member_id, learner.address, connect)
        self._known.set()
        if former is not None:
            former.replaced.set()
            self._closing.spawn(former.close(), "close-former-learner")
