"""One reward endpoint as the client sees it: its channel, what is in flight, and whether it may be called.

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
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import grpc

from rollmesh.mesh.access.authenticated_channel import AuthenticatedChannel
from rollmesh.mesh.access.credentials import SharedKey
from rollmesh.mesh.access.roles import Identity
from rollmesh.mesh.access.tls import client_credentials
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.reward import EndpointTls, RewardSection
from rollmesh.mesh.private_files import read_secret
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.protos import reward_pb2, reward_pb2_grpc
from rollmesh.reward_service.client.endpoint_circuit import EndpointCircuit
from rollmesh.reward_service.client.outgoing import Wants
from rollmesh.reward_service.client.validation import without_repeats
from rollmesh.reward_service.routing import split_routes, target_of

Connect = Callable[[str], grpc.aio.Channel]
OnResult = Callable[[reward_pb2.ScoreResult], bool]

_FREE_CALLS = 2
_MAX_CALLS = 32
# Least seconds between the starts of calls beyond the free ones.
_SPACING_S = 0.02
_INFO_TIMEOUT_S = 2.0
_MAX_ITEMS = 512
# Bytes of a request that servers take unless they say otherwise.
_MAX_BYTES = 1 << 20
# A call of this many seconds, and as many more for each item, is over in a moment: a stream's messages cost five times
# the processor time of one answer, and would save no one a wait.
_MOMENT_S, _ITEM_MOMENT_S = 0.2, 0.001
# By how much fewer items are sent after silence: it costs a call's deadline each time.
_FEWER = 8


class RewardEndpoint:
    """A reward service at one address.

    Attributes:
        address: as configured, `grpc://host:port`.
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
        self._channel = connect(address)
        self._stub = reward_pb2_grpc.RewardStub(self._channel)
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
            grpc.aio.AioRpcError: as it failed.
        """
        began = time.monotonic()
        try:
            await self._call(items, timeout_s, on_result)
        finally:
            self._lasting = time.monotonic() - began > _MOMENT_S + _ITEM_MOMENT_S * len(items)

    async def _call(self, items: list[reward_pb2.ScoreItem], timeout_s: float, on_result: OnResult) -> None:
        if not (self.info.streams and self._lasting):
            response = await self._stub.Score(reward_pb2.ScoreRequest(items=items), timeout=timeout_s)
            for result in without_repeats(response.results):
                on_result(result)
            return
        call = self._stub.ScoreStream((reward_pb2.ScoreStreamRequest(item=item) for item in items), timeout=timeout_s)
        try:
            async for result in call:
                if not on_result(result):
                    # A server that does not end its side must not keep the call.
                    return
        finally:
            call.cancel()

    async def describe(self) -> None:
        """Asks for the server's limits; a server without Info has none.

        Raises:
            grpc.aio.AioRpcError: where the server cannot be reached.
        """
        info = reward_pb2.InfoResponse()
        try:
            info = await self._stub.Info(reward_pb2.InfoRequest(), timeout=_INFO_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise
        self.info, self.wants = info, Wants.of(info)
        self._declared = self._limit = min(info.max_items or _MAX_ITEMS, _MAX_ITEMS)
        self.described = True

    async def close(self) -> None:
        """Ends running calls and the channel."""
        await self._channel.close()


def connector(
    security: SecuritySection,
    keys: Mapping[str, Path] = MappingProxyType({}),
    tls: Mapping[str, EndpointTls] = MappingProxyType({}),
    *,
    max_message_mb: int = 64,
) -> Connect:
    """Opens channels to configured endpoints, which may be other people's servers.

    `grpc://` is plain text; `grpcs://` is TLS, checked by the endpoint's own authority, or by `security.tls_ca`, or
    else by the usual public authorities.
    Neither carries the mesh's credentials: reward services of the mesh itself are found through its membership. Neither
    carries the mesh's keepalive pings: a server with gRPC's defaults hangs up on clients that ping so often. The
    deadline of every call finds a dead connection anyway.

    Args:
        keys: by endpoint, the file with the key that is sent there.
        tls: by endpoint, the files for its TLS.
    """
    files = {target_of(address): path for address, path in keys.items()}
    own_tls = {target_of(address): section for address, section in tls.items()}
    options = [
        ("grpc.max_send_message_length", max_message_mb << 20),
        ("grpc.max_receive_message_length", max_message_mb << 20),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.use_local_subchannel_pool", 1),
    ]

    def connect(address: str) -> grpc.aio.Channel:
        target = target_of(address)
        path = files.get(target)
        if not address.startswith("grpcs://"):
            channel = grpc.aio.insecure_channel(target, options=options)
        else:
            own = own_tls.get(target, EndpointTls())
            ca = own.ca or security.tls_ca
            credentials = client_credentials(ca, own.cert, own.key, f"reward.tls.{address}.")
            channel = grpc.aio.secure_channel(target, credentials, options=options)
        if path is None:
            return channel
        return AuthenticatedChannel(channel, SharedKey(read_secret(path, f"reward.key_files.{address}")))

    return connect


def mesh_connector(security: SecuritySection, identity: Identity | None = None, *, max_message_mb: int = 64) -> Connect:
    """Opens channels to reward services that are members of the mesh, with its credentials and TLS.

    Args:
        identity: the caller's; None: as the token file makes it.
    """
    return lambda address: open_channel(target_of(address), security, identity, max_message_mb=max_message_mb)


def configured(reward: RewardSection, security: SecuritySection) -> dict[str, Callable[[], grpc.aio.Channel]]:
    """Openers of channels, as the client has them, to all servers that the configuration names; by address.

    Args:
        reward: of the run.
        security: of the caller.
    """
    connect = connector(security, reward.key_files, reward.tls)
    routed = split_routes(reward.by_data_source)[1].values()
    addresses = dict.fromkeys((*reward.endpoints, *chain.from_iterable(routed)))
    return {address: partial(connect, address) for address in addresses}


async def close_all(endpoints: list[RewardEndpoint]) -> None:
    """Closes several endpoints."""
    await asyncio.gather(*(endpoint.close() for endpoint in endpoints))
