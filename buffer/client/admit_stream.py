"""A generator's end of the Admit stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rollmesh.buffer.client.lease_stream import LeaseStream
from rollmesh.buffer.protocol.leases import Lease
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb


class AdmitStream(LeaseStream):
    """A stream of grants: `async for grant in stream` yields them; `update` states credits and the version served.

    A grant is the caller's from then on: `holdings` has to name it until nothing is left to do for it.

    Attributes:
        waiting_reason: why nothing is granted at present; empty when something was just granted.
        on_cancelled: called on the event loop with leases of groups that are not needed any more. They are over the
            bound, withdrawn, granted to another generator, or granted in a time that Redis has lost. Their work stops
            at once. It must not block. The same lease may come twice, or a lease may come after its grant was lost.
            Compare leases, not groups: the same member may hold the group again under another lease. Grants that are
            cancelled before they were taken from the stream are dropped, and their credit returns.
    """

    def __init__(self, stub: Any, table: str, member_id: str, generation: Callable[[], int], retry_s: float) -> None:
        self._stub = stub
        self._table = table
        self._member_id = member_id
        self._generation = generation
        self._credits = 0
        self._serving: PolicyVersion | None = None
        self._outstanding = 0
        # Drafts that came before their grant.
        self._drafts: dict[Lease, list[pb.MemberDraft]] = {}
        self.on_cancelled: Callable[[Sequence[pb.LeaseRef]], None] = _ignore_cancellations
        self._grants: dict[Lease, pb.GroupGrant] = {}
        self._news = asyncio.Event()
        self.waiting_reason = "connecting to the buffer"
        super().__init__(f"admission ({table})", retry_s)

    def update(
        self,
        credits: int | None = None,  # noqa: A002  the contract's word
        serving: PolicyVersion | None = None,
        outstanding: int | None = None,
    ) -> None:
        """States how many groups can be started now beyond those held, and the version served.

        Args:
            credits: replaces the number sent before; None leaves what is left of it.
            serving: None leaves it.
            outstanding: groups with responses that are still being sampled; None leaves it.

        Raises:
            RollmeshError: the stream has ended for good.
        """
        self._credits = self._credits if credits is None else max(0, credits)
        self._serving = serving or self._serving
        self._outstanding = self._outstanding if outstanding is None else outstanding
        self._report(None)

    def _undelivered(self) -> Iterable[Lease]:
        return self._grants

    def _report(self, inventory: pb.Inventory | None) -> None:
        self._send(self._request(inventory))

    def _request(self, inventory: pb.Inventory | None) -> pb.AdmitRequest:
        return pb.AdmitRequest(
            table=self._table,
            member_id=self._member_id,
            generation=self._generation(),
            credits=self._credits,
            serving=self._serving.to_proto() if self._serving else None,
            outstanding=self._outstanding,
            received=self._received_count,
            inventory=inventory,
        )

    def _start_call(self) -> Any:
        return self._stub.Admit()

    def _replay_requests(self) -> list[pb.AdmitRequest]:
        self._drafts.clear()
        self._received_count = 0
        return [self._request(self._inventory())]

    def _accept(self, response: pb.AdmitResponse) -> None:
        if response.inventory_within_ms:
            self._answer_inquiry(response.inventory_within_ms)
            return
        if response.cancelled:
            # This says nothing else.
            self._cancel(response.cancelled)
            return
        self.waiting_reason = response.waiting_reason
        before = self._received_count
        for grant in response.grants:
            key = Lease.of(grant)
            if not grant.HasField("task"):
                self._drafts.setdefault(key, []).extend(grant.drafts)
                continue
            grant.drafts.extend(self._drafts.pop(key, ()))
            if self._is_new(key):
                self._credits = max(0, self._credits - 1)
                self._outstanding += 1
                self._grants[key] = grant
                self._news.set()
        if self._received_count != before:
            self._report(None)

    def _cancel(self, leases: Sequence[pb.LeaseRef]) -> None:
        self.on_cancelled(leases)
        untaken = [self._grants.pop(Lease.of(lease), None) for lease in leases]
        if returned := sum(grant is not None for grant in untaken):
            self.update(self._credits + returned)

    def _on_failure(self, error: RollmeshError) -> None:
        self.waiting_reason = str(error)
        self._news.set()

    def __aiter__(self) -> AdmitStream:
        return self

    async def __anext__(self) -> pb.GroupGrant:
        while not self._grants:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        return self._grants.pop(next(iter(self._grants)))


def _ignore_cancellations(_leases: Sequence[pb.LeaseRef]) -> None:
    """Does nothing: the default, until the owner sets another."""
