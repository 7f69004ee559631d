"""The learner's end of the Sample stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from buffer.streams import Seen, StandingStream
from mesh.errors import RollmeshError
from protos import buffer_pb2 as pb


class SampleStream(StandingStream):
    """`request` asks for groups, `next` waits for them.

    After a reconnect the server offers everything leased to this incarnation again; groups known already are left
    out, so that none is lost and none comes twice.

    Attributes:
        waiting_reason: why nothing comes at present; empty when something just came.
    """

    def __init__(
        self,
        stub: Any,
        table: str,
        incarnation: int,
        with_payloads: bool,
        retry_s: float,
        repair: Callable[[], Awaitable[None]],
    ) -> None:
        self._stub = stub
        self._table = table
        self._incarnation = incarnation
        self._with_payloads = with_payloads
        self._open_credits: dict[int, int] = {}
        self._seen = Seen()
        self._responses: asyncio.Queue[pb.SampleResponse | RollmeshError] = asyncio.Queue()
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

    async def next(self, timeout_s: float) -> pb.SampleResponse | None:
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
        return self._stub.Sample()

    def _greeting(self) -> list[pb.SampleRequest]:
        wanted = sorted((version, count) for version, count in self._open_credits.items() if count > 0)
        return [self._request(count, version) for version, count in wanted] or [self._request(0, 0)]

    def _received(self, response: pb.SampleResponse) -> None:
        self.waiting_reason = response.waiting_reason
        fresh = [group for group in response.groups if self._seen.add((group.group_id, group.lease_id))]
        for group in fresh:
            self._deliver(group)
        if response.exhausted:
            self._open_credits.clear()
        if len(fresh) < len(response.groups):
            response = pb.SampleResponse(groups=fresh, exhausted=response.exhausted)
        if response.groups or response.exhausted:
            self._responses.put_nowait(response)

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
