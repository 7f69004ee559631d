"""The learner's end of the Sample stream."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import grpc

from rollmesh.buffer.client.lease_stream import LeaseStream
from rollmesh.buffer.protocol.leases import Lease, leases_of
from rollmesh.buffer.protocol.payload_framing import ParsedMessage, split_parser, split_payloads
from rollmesh.mesh.errors import PayloadError, RollmeshError
from rollmesh.protos import buffer_pb2 as pb

log = logging.getLogger(__name__)
_METHOD = "/rollmesh.v1.Buffer/Sample"


class ReceivedGroup(NamedTuple):
    """A leased group; its payloads by position in `leased.members`, empty where they did not come along."""

    leased: pb.LeasedGroup
    payloads: Sequence[memoryview]

    @property
    def lease(self) -> Lease:
        return Lease.of(self.leased)


class SampleUpdate(NamedTuple):
    """A message of the stream: leased groups; whether the data has ended (`exhausted`); leases that are no longer held
    (`lost`).

    A group that comes again comes under a newer lease: the earlier one is over.
    """

    groups: Sequence[ReceivedGroup]
    exhausted: bool = False
    lost: Sequence[pb.LeaseRef] = ()


class SampleStream(LeaseStream):
    """A stream of leased groups: `request` asks for them, `next` waits for them.

    A group is the caller's from then on: `holdings` has to name it until it is claimed or given back.

    After a reconnect the server offers everything leased to this incarnation again. Groups known already are left out,
    so that none is lost and none comes twice.

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
        recover: Callable[[], Awaitable[None]],
    ) -> None:
        self._call = channel.stream_stream(
            _METHOD,
            request_serializer=pb.SampleRequest.SerializeToString,
            response_deserializer=split_parser(pb.SampleResponse, "payloads"),
        )
        self._table = table
        self._incarnation = incarnation
        self._with_payloads = with_payloads
        self._open_credits: dict[int, int] = {}
        self._arrivals: deque[SampleUpdate] = deque()
        self._news = asyncio.Event()
        self.waiting_reason = "connecting to the buffer"
        self._recover = recover
        super().__init__(f"sampling ({table})", retry_s)

    def request(self, credits: int, for_version: int) -> None:  # noqa: A002  the contract's word
        """Asks for `credits` more groups that train at `for_version`; older requests lapse once theirs is over.

        Raises:
            RollmeshError: the stream has ended for good.
        """
        self._open_credits[for_version] = self._open_credits.get(for_version, 0) + credits
        self._send(self._request(credits, for_version))

    def outstanding(self, version: int) -> int:
        """Groups for `version` that were asked for and were not taken from the stream yet."""
        arrived = (group.leased.for_version == version for some in self._arrivals for group in some.groups)
        return max(0, self._open_credits.get(version, 0)) + sum(arrived)

    def forget(self, leases: Iterable[Lease]) -> None:
        """Leases that the caller has given back: should one be offered again, it is passed on again."""
        for lease in leases:
            self._seen.forget(lease)

    def _undelivered(self) -> Iterable[Lease]:
        return (group.lease for some in self._arrivals for group in some.groups)

    def _report(self, inventory: pb.Inventory | None) -> None:
        self._send(self._request(0, 0, inventory))

    def _request(self, count: int, for_version: int, inventory: pb.Inventory | None = None) -> pb.SampleRequest:
        return pb.SampleRequest(
            table=self._table,
            incarnation=self._incarnation,
            credits=count,
            for_version=for_version,
            with_payloads=self._with_payloads,
            received=self._received_count,
            inventory=inventory,
        )

    async def next(self, timeout_s: float) -> SampleUpdate | None:
        """The next update; None after `timeout_s`.

        Raises:
            RollmeshError: the stream has ended for good (fenced, unreachable).
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not self._arrivals:
                    if self._error is not None:
                        raise self._error
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return None
        return self._arrivals.popleft()

    def _start_call(self) -> Any:
        return self._call()

    def _replay_requests(self) -> list[pb.SampleRequest]:
        self._received_count = 0
        wanted = sorted((version, count) for version, count in self._open_credits.items() if count > 0)
        return [self._request(0, 0, self._inventory()), *(self._request(count, version) for version, count in wanted)]

    def _accept(self, parts: ParsedMessage[pb.SampleResponse]) -> None:
        response = parts.message
        if response.inventory_within_ms:
            self._answer_inquiry(response.inventory_within_ms)
            return
        self.waiting_reason = response.waiting_reason
        fresh = [group for group in _received_groups(response, parts.payloads) if self._is_new(group.lease)]
        for group in fresh:
            self._use_credit(group.leased)
        if response.exhausted:
            self._open_credits.clear()
        self.forget(leases_of(response.lost))
        # A caller that does not say what it holds has nothing to strike out.
        lost = response.lost if self.holdings is not None else ()
        if fresh or response.exhausted or lost:
            self._arrivals.append(SampleUpdate(fresh, response.exhausted, lost))
            self._news.set()

    def _use_credit(self, group: pb.LeasedGroup) -> None:
        version = group.for_version
        self._open_credits[version] = self._open_credits.get(version, 0) - 1
        for other in [v for v, count in self._open_credits.items() if count <= 0 or v < version]:
            del self._open_credits[other]

    async def _on_lost_state(self) -> None:
        await self._recover()

    def _on_failure(self, error: RollmeshError) -> None:
        self.waiting_reason = str(error)
        self._news.set()


def _received_groups(response: pb.SampleResponse, payloads: memoryview) -> Iterator[ReceivedGroup]:
    """The groups of a response. Where lengths do not add up, they come without payloads, and cannot be trained."""
    sizes = [size for group in response.groups for size in group.payload_bytes]
    try:
        values = iter(split_payloads(payloads, sizes))
    except PayloadError as error:
        log.error("payloads of %d groups cannot be assigned to them: %s", len(response.groups), error)
        for group in response.groups:
            yield ReceivedGroup(group, ())
        return
    for group in response.groups:
        yield ReceivedGroup(group, [next(values) for _ in group.payload_bytes])
