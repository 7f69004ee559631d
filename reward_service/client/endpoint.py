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
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from types import MappingProxyType

import grpc

from rollmesh.mesh.access.roles import Identity
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.reward import EndpointTls
from rollmesh.mesh.private_files import read_secret
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.client.channels import foreign_channels, mesh_channels
from rollmesh.reward_service.client.endpoint_circuit import EndpointCircuit
from rollmesh.reward_service.client.outgoing import Wants
from rollmesh.reward_service.client.transports.grpc_calls import GrpcTransport
from rollmesh.reward_service.client.transports.http_calls import Site
from rollmesh.reward_service.client.transports.interface import CallError, Connect, StreamingTransport, Transport
from rollmesh.reward_service.client.transports.json_calls import JsonTransport
from rollmesh.reward_service.client.transports.nemo_gym import NemoGymTransport
from rollmesh.reward_service.client.transports.openrlhf import OpenRlhfTransport
from rollmesh.reward_service.client.validation import without_repeats
from rollmesh.reward_service.routing import NEMO_GYM, OPENRLHF, is_grpc, url_of

OnResult = Callable[[reward_pb2.ScoreResult], bool]

_FREE_CALLS = 2
_MAX_CALLS = 32
# Least seconds between the starts of calls beyond the free ones.
_SPACING_S = 0.02
_INFO_TIMEOUT_S = 2.0
_MAX_ITEMS = 512
_BY_FORM: Mapping[str, Callable[[Site], Transport]] = {
    "": JsonTransport,
    OPENRLHF: OpenRlhfTransport,
    NEMO_GYM: NemoGymTransport,
}
# Bytes of a request that servers take unless they say otherwise.
_MAX_BYTES = 1 << 20
# A call of this many seconds, and as many more for each item, is over in a moment. A stream's messages cost about ten
# times the processor time of one answer, and would save no wait then.
_MOMENT_S, _ITEM_MOMENT_S = 0.2, 0.001
# By how much fewer items are sent after silence: it costs a call's deadline each time.
_FEWER = 8


class RewardEndpoint:
    """A reward service at one address.

    Attributes:
        address: as configured.
        circuit: its recent failures.
        info: what it last said of itself; empty for a server without Info.
        wants: the parts of items that it reads.
        outstanding: items in flight.
        described: true once it has stated its limits (Info). It is asked before the first request, and again after
            the connection was lost, which makes Info the probe of a server that was away.
    """

    def __init__(self, address: str, connect: Connect) -> None:
        self.address = address
        self.circuit = EndpointCircuit()
        self.info = reward_pb2.InfoResponse()
        self.wants = Wants()
        self.outstanding = 0
        self.described = False
        self.last_start = 0.0
        self._window = math.inf
        # The last call took longer than a moment, or there has been none.
        self._lasting = True
        self._transport = connect(address)
        self._calls = 0
        self._declared = _MAX_ITEMS
        self._limit = _MAX_ITEMS

    @property
    def max_items(self) -> int:
        """Most items for one request at present: as the server declared, fewer while it refuses such requests."""
        return self._limit

    @property
    def enough_bytes(self) -> int:
        """Bytes of items after which a request is sent."""
        return min(_MAX_BYTES, self.max_bytes or _MAX_BYTES)

    @property
    def max_bytes(self) -> int:
        """Bytes of items that a request may have; 0: no limit is known."""
        # Each item is preceded by a few bytes.
        return int(self.info.max_bytes) * 15 // 16

    @property
    def free_items(self) -> float:
        """Number of items that may be sent in addition to those in flight."""
        return self._window - self.outstanding

    def narrow_window(self, begun: int) -> None:
        """Lowers the number of items in flight to those that the server could begin in time."""
        self._window = max(1, begun)

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
        most = 1 if probing else min(_MAX_CALLS, self.info.max_concurrency or _MAX_CALLS)
        if self._calls >= most or self.free_items <= 0:
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

    def answered(self) -> None:
        """Counts an item in flight that has its result."""
        self.outstanding -= 1

    def end(self, items: int) -> None:
        """Counts a call that has ended, with `items` items that have no result."""
        self._calls -= 1
        self.outstanding -= items

    async def score(self, items: list[reward_pb2.ScoreItem], timeout_s: float, on_result: OnResult) -> None:
        """Makes one call: ScoreStream where the server has it and calls last, else Score.

        Args:
            timeout_s: deadline of the call.
            on_result: gets each result as soon as it is there; says whether more are missing.

        Raises:
            CallError: as it failed.
        """
        began = time.monotonic()
        try:
            await self._call(items, timeout_s, on_result)
        finally:
            self._lasting = time.monotonic() - began > _MOMENT_S + _ITEM_MOMENT_S * len(items)

    async def _call(self, items: list[reward_pb2.ScoreItem], timeout_s: float, on_result: OnResult) -> None:
        transport = self._transport
        if not (self._lasting and self.info.streams and isinstance(transport, StreamingTransport)):
            response = await transport.score(reward_pb2.ScoreRequest(items=items), timeout_s)
            for result in without_repeats(response.results):
                on_result(result)
            return
        async with aclosing(transport.stream(items, timeout_s)) as results:
            async for result in results:
                if not on_result(result):
                    # A server that does not end its side must not keep the call.
                    return

    async def describe(self) -> None:
        """Asks for the server's limits; a server without Info has none.

        Raises:
            CallError: where the server cannot be reached.
        """
        info = reward_pb2.InfoResponse()
        try:
            info = await self._transport.info(_INFO_TIMEOUT_S)
        except CallError as error:
            if error.status is grpc.StatusCode.UNAVAILABLE:
                raise
        self.info, self.wants = info, Wants.of(info)
        self._declared = self._limit = min(info.max_items or _MAX_ITEMS, _MAX_ITEMS)
        self.described = True

    async def close(self) -> None:
        """Ends running calls and the connection."""
        await self._transport.close()


def connector(
    security: SecuritySection,
    keys: Mapping[str, Path] = MappingProxyType({}),
    tls: Mapping[str, EndpointTls] = MappingProxyType({}),
    *,
    max_message_mb: int = 64,
) -> Connect:
    """Connects to configured endpoints, which may be other people's servers; see `foreign_channels` and `HttpCalls`.

    Args:
        keys: by endpoint, the file with the key that is sent there.
        tls: by endpoint, the files for its TLS.
    """
    open_channel = foreign_channels(security, keys, tls, max_message_mb=max_message_mb)
    files = {url_of(address): path for address, path in keys.items() if not is_grpc(address)}
    own_tls = {url_of(address): section for address, section in tls.items() if not is_grpc(address)}

    def connect(address: str) -> Transport:
        if is_grpc(address):
            return GrpcTransport(open_channel(address))
        form, url = url_of(address)
        path = files.get((form, url))
        key = "" if path is None else read_secret(path, f"reward.key_files.{address}")
        own = own_tls.get((form, url), EndpointTls())
        own = own.model_copy(update={"ca": own.ca or security.tls_ca})
        return _BY_FORM[form](Site(url, key, own, max_message_mb << 20, f"reward.tls.{address}."))

    return connect


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
