"""One reward endpoint as the client sees it: what is in flight there, and whether it may be called.

Calls in flight: two at any time; more only if the last call began a while ago. So items pile up into larger requests
while an endpoint is busy, and a slow endpoint still gets a fresh request every few milliseconds. The CPU that calls
cost is bounded either way.

Items in flight: all, until the endpoint cannot begin some in time, or does not answer in time. Then it gets as many as
it could begin, and twice as many after every answer. The others wait here, in their order.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import grpc

from rollmesh.mesh.access.roles import Identity
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.client.channels import foreign_channels, mesh_channels
from rollmesh.reward_service.client.endpoint_circuit import EndpointCircuit
from rollmesh.reward_service.client.transports.grpc_calls import GrpcTransport
from rollmesh.reward_service.client.transports.interface import CallError, Connect

_FREE_CALLS = 2
_MAX_CALLS = 32
# Least seconds between the starts of calls beyond the free ones.
_SPACING_S = 0.02
_INFO_TIMEOUT_S = 2.0
_MAX_ITEMS = 512
# By how much fewer items are sent after silence: it costs a call's deadline each time.
_FEWER = 8


class RewardEndpoint:
    """A reward service at one address.

    Attributes:
        address: as configured.
        circuit: its recent failures.
        outstanding: items in flight.
        described: true once it has stated its limits (Info). It is asked before the first request, and again after
            the connection was lost, which makes Info the probe of a server that was away.
    """

    def __init__(self, address: str, connect: Connect) -> None:
        self.address = address
        self.circuit = EndpointCircuit()
        self.outstanding = 0
        self.described = False
        self.last_start = 0.0
        self._window = math.inf
        self._transport = connect(address)
        self._calls = 0
        self._declared = _MAX_ITEMS
        self._limit = _MAX_ITEMS

    @property
    def max_items(self) -> int:
        """Most items for one request at present: as the server declared, fewer while it refuses such requests."""
        return self._limit

    @property
    def free_items(self) -> float:
        """Number of items that may be sent in addition to those in flight."""
        return self._window - self.outstanding

    def narrow_window(self, refused: int) -> None:
        """Lowers the number of items in flight by those that the server could not begin in time."""
        self._window = max(1, self.outstanding - refused)

    def on_timeout(self, items: int) -> None:
        """Lowers the number of items in flight after a call without an answer, without blaming any of its items."""
        alone = self.outstanding == items
        self._window = max(1, self.outstanding // _FEWER)
        if alone and items > 1:
            self.reduce_limit(items)

    def reduce_limit(self, refused: int) -> None:
        """Halves the largest request, after the server found one of `refused` items too large."""
        self._limit = max(1, refused // 2)

    def on_success(self, items: int) -> None:
        """Raises both limits after a request of `items` items was answered."""
        self._limit = min(self._declared, self._limit + 1)
        self._window += items

    def ready_at(self, now: float) -> float:
        """Monotonic time from which it may be called; infinite where only a finished call can free it."""
        at = self.circuit.ready_at()
        probing = not self.circuit.closed or not self.described
        if self._calls >= (1 if probing else _MAX_CALLS) or self.free_items <= 0:
            return float("inf")
        if self._calls >= _FREE_CALLS:
            at = max(at, self.last_start + _SPACING_S)
        return max(now, at)

    @property
    def busy(self) -> bool:
        """True while a call is in flight."""
        return self._calls > 0

    def begin(self, items: int, now: float) -> None:
        """Counts a call that is about to be made."""
        self._calls += 1
        self.last_start = now
        self.outstanding += items

    def end(self, items: int) -> None:
        """Counts a call that has ended."""
        self._calls -= 1
        self.outstanding -= items

    async def score(self, items: list[reward_pb2.ScoreItem], timeout_s: float) -> reward_pb2.ScoreResponse:
        """Calls Score once.

        Raises:
            CallError: as it failed.
        """
        return await self._transport.score(reward_pb2.ScoreRequest(items=items), timeout_s)

    async def describe(self) -> None:
        """Asks for the server's limits; a server without Info has none.

        Raises:
            CallError: where the server cannot be reached.
        """
        declared = 0
        try:
            declared = (await self._transport.info(_INFO_TIMEOUT_S)).max_items
        except CallError as error:
            if error.status is grpc.StatusCode.UNAVAILABLE:
                raise
        self._declared = self._limit = min(declared or _MAX_ITEMS, _MAX_ITEMS)
        self.described = True

    async def close(self) -> None:
        """Ends running calls and the connection."""
        await self._transport.close()


def connector(
    security: SecuritySection, keys: Mapping[str, Path] = MappingProxyType({}), *, max_message_mb: int = 64
) -> Connect:
    """Connects to configured endpoints, which may be other people's servers; see `foreign_channels`.

    Args:
        keys: by endpoint, the file with the key that is sent there.
    """
    open_foreign = foreign_channels(security, keys, max_message_mb=max_message_mb)
    return lambda address: GrpcTransport(open_foreign(address))


def mesh_connector(security: SecuritySection, identity: Identity | None = None, *, max_message_mb: int = 64) -> Connect:
    """Connects to reward services that are members of the mesh; see `mesh_channels`.

    Args:
        identity: the caller's; None: as the token file makes it.
    """
    open_member = mesh_channels(security, identity, max_message_mb=max_message_mb)
    return lambda address: GrpcTransport(open_member(address))


async def close_all(endpoints: list[RewardEndpoint]) -> None:
    """Closes several endpoints."""
    await asyncio.gather(*(endpoint.close() for endpoint in endpoints))
