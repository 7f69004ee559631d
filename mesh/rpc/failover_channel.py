"""One channel over all fronts of the mesh, each of which serves every call.

Invariants: calls and streams go to the fronts in turn. A front that has failed a call, or has lost its connection, is
skipped while another one answers. If none seems to answer, all are tried. The channel repeats no call: callers repeat
(every verb of the mesh may be repeated), and the next try goes to another front. The addresses given at the start are
kept for good; others follow the list of fronts that the mesh reports. A channel is connected to two fronts that answer,
each client to two of its own choice. So further fronts take connections from the others, with thousands of clients too.

gRPC's own balancing over several addresses does not suffice. It takes no host names, checks all certificates against
one name, and cannot change its set of addresses.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc

from rollmesh.mesh.access.credentials import Credentials
from rollmesh.mesh.access.roles import Identity
from rollmesh.mesh.access.token_file import credentials_of
from rollmesh.mesh.addresses import addresses_of, host_of
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.connection_options import KEEPALIVE_S, keepalive_of
from rollmesh.mesh.rpc.errors import is_transient_code
from rollmesh.mesh.runtime.background_tasks import BackgroundTasks, log_errors
from rollmesh.mesh.runtime.hosts import is_loopback

log = logging.getLogger(__name__)
# Seconds for which a front that failed a call is passed over.
_SUSPECT_S = 5.0
# Seconds for which a connection that is replaced is kept for its calls.
_LAST_CALLS_S = 10.0
# Fronts to which a client is connected: when one fails, another answers at once.
_CONNECTED = 2
_STATE = grpc.ChannelConnectivity


def is_local(mesh: str) -> bool:
    """True if all addresses of a mesh are of this machine's loopback.

    Raises:
        ConfigError: as `addresses_of`.
    """
    return all(is_loopback(host_of(address)) for address in addresses_of(mesh))


def open_mesh(
    mesh: str,
    security: SecuritySection,
    identity: Identity | None = None,
    *,
    max_message_mb: int = 64,
    keepalive_s: float | None = None,
) -> FailoverChannel:
    """A channel to the fronts of a mesh.

    Args:
        mesh: `host:port` of one front or more, with commas between them.
        identity: the caller of all calls; none: the identity that the token file gives.
        keepalive_s: seconds of silence after which a connection is asked for a sign of life; none: as the lease term
            asks for.
    """
    credentials = credentials_of(security, identity)

    def open_front(address: str, keepalive_s: float) -> grpc.aio.Channel:
        return open_channel(address, security, credentials, max_message_mb=max_message_mb, keepalive_s=keepalive_s)

    return FailoverChannel(addresses_of(mesh), open_front, credentials, keepalive_s)


class _Front:
    """A front with its connection."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.channel = channel
        self.suspect_until = 0.0
        self.calls = 0
        # Clients rank fronts differently, so that each front has its share of clients.
        self.rank = random.random()  # noqa: S311  no secret


class FailoverChannel(grpc.aio.Channel):
    """Spreads calls over fronts; for stubs it is a channel like any other.

    Args:
        addresses: fronts known from the start; never forgotten.
        open_front: opens the connection to one of them, with a given keepalive.
        keepalive_s: seconds of silence after which a connection is asked for a sign of life; none: as the lease term
            asks for.

    Attributes:
        credentials: of the caller; None where the mesh has no token.
        keepalive_s: of the connections.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        open_front: Callable[[str, float], grpc.aio.Channel],
        credentials: Credentials | None,
        keepalive_s: float | None = None,
    ) -> None:
        self._open_front = open_front
        self.credentials = credentials
        self._follows_lease = keepalive_s is None
        self.keepalive_s = KEEPALIVE_S if keepalive_s is None else keepalive_s
        self._given = tuple(addresses)
        self._listed = self._given
        self._fronts = {address: _Front(address, open_front(address, self.keepalive_s)) for address in addresses}
        # Not all clients begin with the same front.
        self._turn = itertools.count(random.randrange(1 << 16))  # noqa: S311  no secret
        self._background = BackgroundTasks(log_errors(log))

    @property
    def addresses(self) -> list[str]:
        """Addresses to which the next calls may go."""
        return list(dict.fromkeys((*self._listed, *self._given)))

    def set_fronts(self, addresses: Iterable[str]) -> None:
        """Uses the fronts that the mesh lists as alive; connections to others end with their last call."""
        listed = tuple(dict.fromkeys(addresses))
        if not listed:
            return
        self._listed = listed
        for address in listed:
            if address not in self._fronts:
                self._fronts[address] = _Front(address, self._open_front(address, self.keepalive_s))
        for front in list(self._fronts.values()):
            if front.address not in self.addresses and not front.calls:
                del self._fronts[front.address]
                self._background.spawn(front.channel.close(), "closing the connection to a former front")
        self._disconnect_unused()

    def set_lease(self, lease_s: float) -> None:
        """Asks for signs of life as the lease term allows; connections that ask otherwise are replaced."""
        if not self._follows_lease or self.keepalive_s == keepalive_of(lease_s):
            return
        self.keepalive_s = keepalive_of(lease_s)
        for front in self._fronts.values():
            self._background.spawn(front.channel.close(_LAST_CALLS_S), "closing a connection with another keepalive")
            front.channel = self._open_front(front.address, self.keepalive_s)

    def _disconnect_unused(self) -> None:
        """Closes connections that carry no call, to fronts that are not this client's choice any more."""
        chosen = self._chosen(time.monotonic())
        if not any(front.channel.get_state() is _STATE.READY for front in chosen):
            return
        for front in self._fronts.values():
            if front not in chosen and not front.calls and front.channel.get_state() is _STATE.READY:
                self._background.spawn(front.channel.close(), "closing a connection that is not used")
                front.channel = self._open_front(front.address, self.keepalive_s)

    def _chosen(self, now: float) -> list[_Front]:
        """The fronts to be connected to: of those that seem to answer the first by rank, listed ones before others."""
        hopeful = [
            front
            for front in (self._fronts[address] for address in self.addresses)
            if front.suspect_until <= now and front.channel.get_state() is not _STATE.TRANSIENT_FAILURE
        ]
        listed = [front for front in hopeful if front.address in self._listed]
        return sorted(listed or hopeful, key=lambda front: front.rank)[:_CONNECTED]

    def choose_front(self) -> _Front:
        """The front of the next call: one by one those to be connected to, then any that is connected, then any."""
        turn, now = next(self._turn), time.monotonic()
        known = [self._fronts[address] for address in self.addresses]
        chosen = self._chosen(now)
        for front in chosen or known:
            # Asking for the state starts to connect where there is no connection.
            front.channel.get_state(try_to_connect=True)
        trusted = [front for front in known if front.suspect_until <= now]
        ready = [front for front in trusted if front.channel.get_state() is _STATE.READY]
        choice = [front for front in chosen if front in ready] or ready or chosen or known
        return choice[turn % len(choice)]

    def start_call(self, begin: Callable[[grpc.aio.Channel], Any]) -> Any:
        """Starts a call at the next front and watches how it ends."""
        front = self.choose_front()
        call = begin(front.channel)
        front.calls += 1
        call.add_done_callback(lambda _call: self._background.spawn(self._judge(front, call), "judging a call"))
        return call

    async def _judge(self, front: _Front, call: Any) -> None:
        front.calls -= 1
        if is_transient_code(await call.code()) and not call.cancelled():
            front.suspect_until = time.monotonic() + _SUSPECT_S

    # --------------------------------------------------------------------------------------- a channel's methods

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        return _Method(self, "stream_stream", args, kwargs)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """The best of the fronts' states."""
        states = [front.channel.get_state(try_to_connect) for front in self._fronts.values()]
        order = (_STATE.READY, _STATE.CONNECTING, _STATE.IDLE, _STATE.TRANSIENT_FAILURE, _STATE.SHUTDOWN)
        return min(states, key=order.index)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Returns once `get_state` says something else."""
        while self.get_state() is last_observed_state:
            waits = [
                asyncio.ensure_future(front.channel.wait_for_state_change(front.channel.get_state()))
                for front in self._fronts.values()
            ]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
                await asyncio.gather(*waits, return_exceptions=True)

    async def channel_ready(self) -> None:
        """Returns once a front is connected."""
        while (state := self.get_state(try_to_connect=True)) is not _STATE.READY:
            await self.wait_for_state_change(state)

    async def close(self, grace: float | None = None) -> None:
        """Closes every connection."""
        await asyncio.gather(*(front.channel.close(grace) for front in self._fronts.values()))
        await self._background.drain()

    async def __aenter__(self) -> FailoverChannel:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()


class _Method:
    """An RPC of a stub; each call goes to the next front."""

    def __init__(self, mesh: FailoverChannel, kind: str, args: Any, kwargs: Any) -> None:
        self._mesh, self._kind, self._args, self._kwargs = mesh, kind, args, kwargs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._mesh.start_call(lambda channel: self._of(channel)(*args, **kwargs))

    def _of(self, channel: grpc.aio.Channel) -> Any:
        return getattr(channel, self._kind)(*self._args, **self._kwargs)
