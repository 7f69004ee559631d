"""A generator's end of the Admit stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from buffer.streams import Seen, StandingStream
from mesh.errors import RollmeshError
from mesh.versions import PolicyVersion
from protos import buffer_pb2 as pb


class AdmitStream(StandingStream):
    """`async for grant in stream` yields grants; `update` states credits and the version served.

    Attributes:
        waiting_reason: why nothing is granted at present; empty when something was just granted.
        on_cancelled: called on the event loop with leases whose groups nobody needs any more (over the bound,
            withdrawn, in other hands): their work stops at once. It must not block; it may be told the same lease
            twice, or one whose grant was lost on the way. Leases are compared, not groups: the same member may hold the
            group again under another lease. Grants that are cancelled before they were taken from the stream are
            dropped, and their credit returns.
    """

    def __init__(self, stub: Any, table: str, member_id: str, generation: Callable[[], int], retry_s: float) -> None:
        self._stub = stub
        self._table = table
        self._member_id = member_id
        self._generation = generation
        self._credits = 0
        self._serving: PolicyVersion | None = None
        self._outstanding = 0
        self._received_here = 0
        self._seen = Seen()
        self._cancelled = Seen()
        # Drafts that came before their grant.
        self._drafts: dict[tuple[str, str], list[pb.MemberDraft]] = {}
        self.on_cancelled: Callable[[Sequence[pb.LeaseRef]], None] = _unheard
        self._grants: asyncio.Queue[pb.GroupGrant | RollmeshError] = asyncio.Queue()
        self.waiting_reason = "connecting to the buffer"
        super().__init__(f"admission ({table})", retry_s)

    def update(
        self,
        credits: int | None = None,  # noqa: A002  the contract's word
        serving: PolicyVersion | None = None,
        outstanding: int | None = None,
    ) -> None:
        """Says how many groups can be started now beyond those held, and what is served.

        Args:
            credits: replaces the figure sent before; None leaves what is left of it.
            serving: None leaves it.
            outstanding: groups with responses that are still being sampled; None leaves it.

        Raises:
            RollmeshError: the stream has ended for good.
        """
        self._credits = self._credits if credits is None else max(0, credits)
        self._serving = serving or self._serving
        self._outstanding = self._outstanding if outstanding is None else outstanding
        self._send(self._request())

    def _request(self) -> pb.AdmitRequest:
        return pb.AdmitRequest(
            table=self._table,
            member_id=self._member_id,
            generation=self._generation(),
            credits=self._credits,
            serving=self._serving.to_proto() if self._serving else None,
            outstanding=self._outstanding,
            received=self._received_here,
        )

    def _open(self) -> Any:
        return self._stub.Admit()

    def _greeting(self) -> list[pb.AdmitRequest]:
        self._drafts.clear()
        self._received_here = 0
        return [self._request()]

    def _received(self, response: pb.AdmitResponse) -> None:
        self.waiting_reason = response.waiting_reason
        if response.cancelled:
            for lease in response.cancelled:
                self._cancelled.add((lease.group_id, lease.lease_id))
            self.on_cancelled(response.cancelled)
        before = self._received_here
        for grant in response.grants:
            key = (grant.group_id, grant.lease_id)
            if not grant.HasField("task"):
                self._drafts.setdefault(key, []).extend(grant.drafts)
                continue
            grant.drafts.extend(self._drafts.pop(key, ()))
            self._received_here += 1
            if self._seen.add(key):
                self._credits = max(0, self._credits - 1)
                self._outstanding += 1
                self._grants.put_nowait(grant)
        if self._received_here != before:
            self._send(self._request())

    def _failed(self, error: RollmeshError) -> None:
        self.waiting_reason = str(error)
        self._grants.put_nowait(error)

    def __aiter__(self) -> AdmitStream:
        return self

    async def __anext__(self) -> pb.GroupGrant:
        while True:
            grant = await self._grants.get()
            if isinstance(grant, RollmeshError):
                self._grants.put_nowait(grant)
                raise grant
            if (grant.group_id, grant.lease_id) not in self._cancelled:
                return grant
            self.update(self._credits + 1)


def _unheard(_leases: Sequence[pb.LeaseRef]) -> None:
    """Until the owner says what to do."""
