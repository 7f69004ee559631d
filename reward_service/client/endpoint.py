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
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType

import grpc

from rollmesh.mesh.access.authenticated_channel import AuthenticatedChannel
from rollmesh.mesh.access.credentials import SharedKey
from rollmesh.mesh.access.roles import Identity
from rollmesh.mesh.access.tls import channel_credentials
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.reward import RewardSection
from rollmesh.mesh.private_files import read_secret
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.protos import reward_pb2, reward_pb2_grpc
from rollmesh.reward_service.client.endpoint_circuit import EndpointCircuit
from rollmesh.reward_service.routing import split_routes, target_of

Connect = Callable[[str], grpc.aio.Channel]

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
        address: as configured, `grpc://host:port`.
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
            grpc.aio.AioRpcError: as it failed.
        """
        response: reward_pb2.ScoreResponse = await self._stub.Score(
            reward_pb2.ScoreRequest(items=items), timeout=timeout_s
        )
        return response

    async def describe(self) -> None:
        """Asks for the server's limits; a server without Info has none.

        Raises:
            grpc.aio.AioRpcError: where the server cannot be reached.
        """
        declared = 0
        try:
            info = await self._stub.Info(reward_pb2.InfoRequest(), timeout=_INFO_TIMEOUT_S)
            declared = info.max_items
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise
        self._declared = self._limit = min(declared or _MAX_ITEMS, _MAX_ITEMS)
        self.described = True

    async def close(self) -> None:
        """Ends running calls and the channel."""
        await self._channel.close()


def connector(
    security: SecuritySection, keys: Mapping[str, Path] = MappingProxyType({}), *, max_message_mb: int = 64
) -> Connect:
    """Opens channels to configured endpoints, which may be other people's servers.

    `grpc://` is plain text; `grpcs://` is TLS, checked by `security.tls_ca` or else by the usual public authorities.
    Neither carries the mesh's credentials: reward services of the mesh itself are found through its membership. Neither
    carries the mesh's keepalive pings: a server with gRPC's defaults hangs up on clients that ping so often. The
    deadline of every call finds a dead connection anyway.

    Args:
        keys: by endpoint, the file with the key that is sent there.
    """
    files = {target_of(address): path for address, path in keys.items()}
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
            tls = channel_credentials(SecuritySection(tls_ca=security.tls_ca)) or grpc.ssl_channel_credentials()
            channel = grpc.aio.secure_channel(target, tls, options=options)
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
    connect = connector(security, reward.key_files)
    routed = split_routes(reward.by_data_source)[1].values()
    addresses = dict.fromkeys((*reward.endpoints, *chain.from_iterable(routed)))
    return {address: partial(connect, address) for address in addresses}


async def close_all(endpoints: list[RewardEndpoint]) -> None:
    """Closes several endpoints."""
    await asyncio.gather(*(endpoint.close() for endpoint in endpoints))
