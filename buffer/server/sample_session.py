"""The learner's standing Sample stream: credits come in, leased groups go out in the order the policy chooses."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from rollmesh.buffer.monitoring.trajectory_spans import record_leases
from rollmesh.buffer.monitoring.wait_clocks import INSERTS
from rollmesh.buffer.policy.batch_selection import BatchCandidates, choose_batch
from rollmesh.buffer.policy.rules import Order
from rollmesh.buffer.protocol.leases import LEARNER, Lease
from rollmesh.buffer.server.change_notifier import wait_for
from rollmesh.buffer.server.custom_score import ScoreCache
from rollmesh.buffer.server.front_context import FrontContext, StreamOwnership, read_requests
from rollmesh.buffer.server.lease_roll_call import RollCall
from rollmesh.buffer.server.sample_messages import messages_of
from rollmesh.buffer.store.direct_handoff import WaitingStream
from rollmesh.buffer.store.errors import lost_state_error, unknown_incarnation_error
from rollmesh.buffer.store.records import Leased
from rollmesh.buffer.store.table_snapshot import TableSnapshot
from rollmesh.mesh.errors import FencedError, StoreError
from rollmesh.mesh.trajectory.versions import checked_version
from rollmesh.protos import buffer_pb2 as pb

log = logging.getLogger(__name__)
_RECHECK_S = 1.0
# Seconds for which ready groups wait at most for writes in progress.
_WRITES_WAIT_S = 0.005
# Candidates considered together; a batch of more is gathered in several turns.
_CANDIDATES_AT_MOST = 2048


@dataclass(slots=True)
class _GroupRequest:
    """A request of the learner for groups, as far as these were not leased yet."""

    version: int
    credits: int


class SampleSession:
    """State of one stream.

    Args:
        front: what the front shares.
        first: the stream's first request; table, incarnation and `with_payloads` hold for all.
    """

    def __init__(self, front: FrontContext, first: pb.SampleRequest) -> None:
        self._front = front
        self._handoff = front.store.handoff
        self._table = front.checked_table(first.table)
        self._rules = front.rules[self._table]
        self._incarnation = first.incarnation
        self._with_payloads = first.with_payloads
        self._token = ""
        # A batch may be under way for longer than a term: the learner only owes answers to questions.
        self._roll_call = RollCall(self._rules.lease_ms / 1000, math.inf)
        self._recheck_s = min(_RECHECK_S, self._roll_call.interval_s)
        self._requested: deque[_GroupRequest] = deque()
        score = front.draws.score if self._rules.order is Order.SCORE else None
        self._scores = ScoreCache(score) if score is not None else None
        self._accept_request(first)

    def _accept_request(self, request: pb.SampleRequest) -> None:
        self._roll_call.record_request(request)
        if request.credits:
            self._requested.append(_GroupRequest(checked_version("for_version", request.for_version), request.credits))

    async def run(self, requests: AsyncIterator[pb.SampleRequest]) -> AsyncIterator[pb.SampleResponse | bytes]:
        """Answers until the learner closes the stream."""
        store = self._front.store
        async with StreamOwnership(self._front, self._table, LEARNER, self._on_end) as stream:
            self._token = stream.token
            held = await store.attach_learner(self._table, self._incarnation, stream.token)
            async for response in self._responses(held):
                yield response
            with self._front.changes.subscribe(self._table) as event:
                async with read_requests(requests, self._accept_request, event) as reader:
                    while not reader.done():
                        event.clear()
                        self._roll_call.check_alive()
                        if within_ms := self._roll_call.inquire_if_due():
                            yield pb.SampleResponse(inventory_within_ms=within_ms)
                        if lost := await self._end_unnamed_leases():
                            yield pb.SampleResponse(lost=[lease.to_proto() for lease in lost])
                        leased, reason = await self._lease_next(event)
                        if leased:
                            self._set_wait("")
                            async for response in self._responses(leased):
                                yield response
                            continue
                        if self._requested and store.snapshots[self._table].exhausted:
                            self._requested.clear()
                            self._set_wait("")
                            yield pb.SampleResponse(exhausted=True, waiting_reason="the data has ended")
                            continue
                        self._set_wait(reason)
                        self._offer_handoff()
                        if not await wait_for(event, self._recheck_s):
                            await store.refresh(self._table)
                            if reason:
                                yield pb.SampleResponse(waiting_reason=reason)

    async def _end_unnamed_leases(self) -> list[Lease]:
        """Makes every group ready again that is leased to the learner and not named in its inventory.

        Returns:
            Leases that it named and does not hold.
        """
        self._handoff.withdraw(self._table)
        if self._handoff.is_pending(self._table):
            # Leases are on their way to this stream: the inventory is compared after they have been sent.
            return []
        named = self._roll_call.pop_inventory()
        if named is None:
            return []
        ended, lost = await self._front.store.end_unnamed_leases(
            self._table, LEARNER, self._incarnation, self._token, named
        )
        if ended:
            log.warning(
                "the learner no longer names %d groups: they are ready again", ended, extra={"table": self._table}
            )
        return lost

    def _set_wait(self, reason: str) -> None:
        self._front.set_wait(self._table, INSERTS, LEARNER, reason)

    def _on_end(self) -> None:
        self._set_wait("")
        self._handoff.withdraw(self._table, self._token)

    def _offer_handoff(self) -> None:
        """Offers this stream to the next write that seals groups, if the order is `fifo` and nothing else is ready."""
        snapshot, requested = self._front.store.snapshots[self._table], self._requested
        if self._rules.order is not Order.FIFO or snapshot.ready or not requested or requested[0].version != snapshot.u:
            self._handoff.withdraw(self._table)
            return
        stream = WaitingStream(self._incarnation, requested[0].version, requested[0].credits, self._token)
        self._handoff.offer(self._table, stream)

    def _collect_deliveries(self) -> list[Leased]:
        """Groups that writes have leased to this stream.

        Raises:
            StoreError: they are not known; the stream must reopen, which offers all that is leased to it.
        """
        found: list[Leased] = []
        for stream, leased in self._handoff.collect(self._table):
            if stream.token != self._token:
                continue
            if leased is None:
                raise StoreError("an answer of Redis was lost", hint="the stream is reopened automatically")
            if self._requested and self._requested[0].version == stream.version:
                self._deduct_credits(self._requested[0], leased)
            found += leased
        return found

    async def _lease_next(self, event: asyncio.Event) -> tuple[list[Leased], str]:
        """Groups leased now, or the reason for their absence; no reason if no credits are open."""
        self._handoff.withdraw(self._table)
        delivered = self._collect_deliveries()
        return (delivered, "") if delivered else await self._lease_ready(event)

    async def _lease_ready(self, event: asyncio.Event) -> tuple[list[Leased], str]:
        """Leases ready groups for the oldest request; returns as `_lease_next`."""
        store = self._front.store
        snapshot = store.snapshots[self._table]
        if snapshot.incarnation > self._incarnation:
            raise FencedError()
        if snapshot.suspect:
            raise lost_state_error()
        if snapshot.incarnation < self._incarnation:
            raise unknown_incarnation_error()
        if self._rules.bounded and any(request.version < snapshot.u for request in self._requested):
            # Read again: Redis may have lost the claim since, and the request is for a repetition of that batch.
            snapshot = await store.refresh(self._table)
            self._requested = deque(request for request in self._requested if request.version >= snapshot.u)
        if not self._requested:
            return [], ""
        request = self._requested[0]
        snapshot = await self._wait_for_writes(request, snapshot, event)
        if not snapshot.ready:
            return [], self._waiting_reason(snapshot)
        with self._front.turns.serving_learner():
            return await self._lease_chosen(request, snapshot)

    async def _lease_chosen(self, request: _GroupRequest, snapshot: TableSnapshot) -> tuple[list[Leased], str]:
        """Leases the groups that the policy chooses of those that are ready; returns as `_lease_next`."""
        store = self._front.store
        leased = await self._lease_last_sealed(request, snapshot)
        if leased:
            return self._deduct_credits(request, leased), ""
        ready = await store.list_candidates(self._table, request.version, self._candidate_count(request))
        if self._scores is not None:
            ready = await self._rank_candidates(self._scores, ready)
        choice, reason = choose_batch(
            self._rules,
            ready,
            version=request.version,
            wanted=request.credits,
            u=snapshot.u,
            first_deadline=snapshot.first_deadline,
        )
        if not choice.group_ids:
            return [], reason
        leased = await store.sample(self._table, self._incarnation, request.version, choice.group_ids, self._token)
        return self._deduct_credits(request, leased), "another front of the buffer handed them out first"

    def _deduct_credits(self, request: _GroupRequest, leased: list[Leased]) -> list[Leased]:
        """Subtracts leased groups from the credits of their request; returns the groups."""
        self._front.queue_latency.observe(self._table, leased)
        if self._front.tracer.is_on:
            record_leases(self._front.tracer, leased)
        request.credits -= len(leased)
        if request.credits <= 0:
            self._requested.popleft()
        return leased

    async def _lease_last_sealed(self, request: _GroupRequest, snapshot: TableSnapshot) -> list[Leased]:
        """Leases all ready groups if the last write of this front sealed them: `fifo` needs no list of candidates."""
        group_ids = self._handoff.pop_last_sealed(self._table, snapshot)
        # For a later version the batches before it would have to be full, which is not known here.
        in_turn = self._rules.order is Order.FIFO and request.version == snapshot.u
        if not group_ids or not in_turn or snapshot.ready > request.credits:
            return []
        return await self._front.store.sample(self._table, self._incarnation, request.version, group_ids, self._token)

    async def _wait_for_writes(
        self, request: _GroupRequest, snapshot: TableSnapshot, event: asyncio.Event
    ) -> TableSnapshot:
        """Waits a moment for groups that writes in progress seal; returns the newest snapshot.

        Under load this makes full messages of what would be many small ones. A lone group waits for nothing.
        """
        store, loop = self._front.store, asyncio.get_running_loop()
        until = loop.time() + _WRITES_WAIT_S
        while 0 < snapshot.ready < request.credits and self._handoff.writes_in_progress:
            event.clear()
            if not await wait_for(event, until - loop.time()):
                break
            snapshot = store.snapshots[self._table]
        return snapshot

    def _candidate_count(self, request: _GroupRequest) -> int:
        """Number of candidates that a choice considers."""
        rules = self._rules
        if self._scores is not None:
            # All that the gate lets become ready, within reason.
            return min(_CANDIDATES_AT_MOST, (rules.max_staleness + 1) * rules.groups_per_step)
        return min(_CANDIDATES_AT_MOST, request.credits + rules.groups_per_step // 2)

    async def _rank_candidates(self, scores: ScoreCache, ready: BatchCandidates) -> BatchCandidates:
        """The candidates, ordered by the user's score."""
        missing = scores.missing(ready.candidates)
        if missing:
            scores.add(await self._front.store.group_facts(self._table, missing))
        return replace(ready, candidates=tuple(scores.ranked(ready.candidates)))

    def _waiting_reason(self, snapshot: TableSnapshot) -> str:
        fleet = self._front.fleet
        text = (
            f"waits for groups: {snapshot.generating} begun, {snapshot.pending} prompts waiting, "
            f"{fleet.alive} generator{'' if fleet.alive == 1 else 's'} alive"
        )
        return f"{text}; a generator says: {fleet.reason}" if fleet.reason else text

    async def _responses(self, leased: Sequence[Leased]) -> AsyncIterator[bytes]:
        """Groups as messages; unsendable ones end as failed, and others are to come in their place."""
        unsendable: dict[str, list[Lease]] = {}
        async for message in messages_of(
            self._front, self._table, leased, self._roll_call, unsendable, with_payloads=self._with_payloads
        ):
            yield message
        for reason, leases in unsendable.items():
            await self._front.store.fail_groups(self._table, leases, reason)
            self._requested.appendleft(_GroupRequest(leased[0].for_version, len(leases)))
