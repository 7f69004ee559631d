"""The learner's end of the Sample stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import grpc

from buffer.beside import Apart, cut, taking_apart
from buffer.streams import Seen, StandingStream
from mesh.errors import PayloadError, RollmeshError
from protos import buffer_pb2 as pb

log = logging.getLogger(__name__)
_METHOD = "/rollmesh.v1.Buffer/Sample"


class Arrived(NamedTuple):
    """A leased group; its payloads by position in `leased.members`, empty where they did not come along."""

    leased: pb.LeasedGroup
    payloads: Sequence[memoryview]


class Arrivals(NamedTuple):
    """Groups that came together; `exhausted`: the data has ended."""

    groups: Sequence[Arrived]
    exhausted: bool


class SampleStream(StandingStream):
    """`request` asks for groups, `next` waits for them.

    After a reconnect the server offers everything leased to this incarnation again; groups known already are left
    out, so that none is lost and none comes twice.

    Attributes:
        waiting_reason: why nothing comes at present; empty when something just came.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        table: str,
        incarnation: int,
        with_payloads: bool,
        retry_s: float,
        repair: Callable[[], Awaitable[None]],
    ) -> None:
        self._call = channel.stream_stream(
            _METHOD,
            request_serializer=pb.SampleRequest.SerializeToString,
            response_deserializer=taking_apart(pb.SampleResponse, "payloads"),
        )
        self._table = table
        self._incarnation = incarnation
        self._with_payloads = with_payloads
        self._open_credits: dict[int, int] = {}
        self._seen = Seen()
        self._responses: asyncio.Queue[Arrivals | RollmeshError] = asyncio.Queue()
        self.waiting_reason = "connecting to the buffer"
        self._repair = repair
        super().__init__(f"sampling ({table})", retry_s)

    def request(self, credits: int, for_version: int) -> None:  # noqa: A002  the contract's word
        """Asks for `credits` more groups that train at `for_version`; older requests lapse once theirs is over.

        Raises:
            RollmeshError: the stream has ended for good.
        """
        self._open_credits[for_version] = self._open_credits.get(for_version, 0) + credits
        self._send(self._request(credits, for_version))

    def _request(self, count: int, for_version: int) -> pb.SampleRequest:
        return pb.SampleRequest(
            table=self._table,
            incarnation=self._incarnation,
            credits=count,
            for_version=for_version,
            with_payloads=self._with_payloads,
        )

    async def next(self, timeout_s: float) -> Arrivals | None:
        """The next groups, or the news that the data has ended (`exhausted`); None after `timeout_s`.

        Raises:
            RollmeshError: the stream has ended for good (fenced, unreachable).
        """
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._responses.get()
        except TimeoutError:
            return None
        if isinstance(response, RollmeshError):
            self._responses.put_nowait(response)
            raise response
        return response

    def _open(self) -> Any:
        return self._call()

    def _greeting(self) -> list[pb.SampleRequest]:
        wanted = sorted((version, count) for version, count in self._open_credits.items() if count > 0)
        return [self._request(count, version) for version, count in wanted] or [self._request(0, 0)]

    def _received(self, parts: Apart[pb.SampleResponse]) -> None:
        response = parts.message
        self.waiting_reason = response.waiting_reason
        fresh = [
            arrived
            for arrived in _arrived(response, parts.payloads)
            if self._seen.add((arrived.leased.group_id, arrived.leased.lease_id))
        ]
        for arrived in fresh:
            self._deliver(arrived.leased)
        if response.exhausted:
            self._open_credits.clear()
        if fresh or response.exhausted:
            self._responses.put_nowait(Arrivals(fresh, response.exhausted))

    def _deliver(self, group: pb.LeasedGroup) -> None:
        version = group.for_version
        self._open_credits[version] = self._open_credits.get(version, 0) - 1
        for other in [v for v, count in self._open_credits.items() if count <= 0 or v < version]:
            del self._open_credits[other]

    async def _lost_state(self) -> None:
        await self._repair()

    def _failed(self, error: RollmeshError) -> None:
        self.waiting_reason = str(error)
        self._responses.put_nowait(error)


def _arrived(response: pb.SampleResponse, payloads: memoryview) -> Iterator[Arrived]:
    """The groups of a response. Where lengths do not add up, they come without payloads: no one can train on them."""
    sizes = [size for group in response.groups for size in group.payload_bytes]
    try:
        values = iter(cut(payloads, sizes))
    except PayloadError as error:
        log.error("payloads of %d groups cannot be told apart: %s", len(response.groups), error)
        for group in response.groups:
            yield Arrived(group, ())
        return
    for group in response.groups:
        yield Arrived(group, [next(values) for _ in group.payload_bytes])
