"""One generator's standing Admit stream: credits come in, grants go out as soon as the gate allows.

Invariants
  * Each stream asks Redis for its share alone (`buffer.server.admission_dealer`). The least loaded generator is served
    first, and no stream asks in vain because of another one.
  * A stream is woken by what concerns it: a request, a share, a cancellation. Changes for others cost it nothing.
  * A generator gets nothing before it has answered on the stream, and nothing more while it owes an answer for grants.
  * A silent generator soon loses its stream. Grants that it never acknowledged are re-admitted at once, as are groups
    that it does not name when it is asked for its holdings (`buffer.server.lease_roll_call`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence

from rollmesh.buffer.monitoring.trajectory_spans import record_admissions
from rollmesh.buffer.monitoring.wait_clocks import SAMPLES
from rollmesh.buffer.policy import gate
from rollmesh.buffer.protocol.framing import field_header, repeated_field
from rollmesh.buffer.protocol.leases import Lease
from rollmesh.buffer.server.admission_dealer import GeneratorDemand, Refusal
from rollmesh.buffer.server.change_notifier import wait_for
from rollmesh.buffer.server.front_context import FrontContext, StreamOwnership, read_requests
from rollmesh.buffer.server.lease_roll_call import RollCall
from rollmesh.buffer.server.request_validation import check_policy
from rollmesh.buffer.store.records import GroupGrant
from rollmesh.buffer.store.table_snapshot import TableSnapshot
from rollmesh.mesh.errors import UnreachableError
from rollmesh.mesh.request_fields import check_id
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb

log = logging.getLogger(__name__)
_GRANTS = pb.AdmitResponse.DESCRIPTOR.fields_by_name["grants"].number
_TASK = pb.GroupGrant.DESCRIPTOR.fields_by_name["task"].number
# Grants are sent once their prompts and drafts have this many bytes. If one grant has more, its drafts come first, in
# grants of the same lease without a task.
_RESPONSE_BYTES = 512 << 10
# A waiter looks at its state again after this many seconds even if nothing wakes it. If the reason of its wait has
# changed, it sends it. With many streams each looks more rarely: this often per second at most, all together.
_RECHECK_S = 1.0
_RECHECKS_PER_S = 100
# A stream ends if its grants stay unanswered for the reconnect grace, and for at least this many seconds.
_LEAST_PATIENCE_S = 1.0
# Fronts do not know one another's streams. If there are several, a full generator asks this many seconds later than
# an idle one.
_COURTESY_S = 0.005


class AdmitSession:
    """State of one stream.

    Args:
        front: what the front shares.
        first: the stream's first request; table, member and generation hold for all.
    """

    def __init__(self, front: FrontContext, first: pb.AdmitRequest) -> None:
        self._front = front
        self._table = front.checked_table(first.table)
        self._member_id = first.member_id
        self._generation = first.generation
        self._rules = front.rules[self._table]
        self._demand = GeneratorDemand()
        self._dealer = front.dealers[self._table]
        self._streams = front.admit_streams[self._table]
        self._roll_call = RollCall(self._rules.lease_ms / 1000, max(_LEAST_PATIENCE_S, self._rules.grace_ms / 1000))
        # The reason that the generator was told last; None before the first.
        self._told: str | None = None
        self._token = ""
        # Cancellations: whether there may be some, and those sent since the last reading.
        self._cancellations_due = True
        self._sent_cancellations: list[Lease] = []
        check_id("member_id", self._member_id)
        self._accept_request(first)

    def _accept_request(self, request: pb.AdmitRequest) -> None:
        check_policy("serving", request.serving)
        self._roll_call.record_request(request)
        # Grants in transit are not in the generator's numbers yet.
        in_transit = self._roll_call.in_transit
        demand = self._demand
        demand.credits, demand.outstanding = max(0, request.credits - in_transit), request.outstanding + in_transit
        demand.serving = PolicyVersion.from_proto(request.serving)

    async def run(self, requests: AsyncIterator[pb.AdmitRequest]) -> AsyncIterator[pb.AdmitResponse | bytes]:
        """Answers until the generator closes the stream; a break shortens its leases to the reconnect grace."""
        store, who = self._front.store, self._member_id
        async with StreamOwnership(self._front, self._table, who, self._on_end) as stream:
            self._token = stream.token
            async with self._front.turns.turn():
                held = await store.attach_generator(self._table, who, self._generation, stream.token)
            async for response in self._responses(held):
                yield response
            event = self._demand.woken
            with self._streams.opened(who, self._on_cancellation):
                async with read_requests(requests, self._accept_request, event) as reader:
                    while not reader.done():
                        event.clear()
                        self._dealer.withdraw(self._demand)
                        await self._check_answers()
                        if within_ms := self._roll_call.inquire_if_due():
                            yield pb.AdmitResponse(inventory_within_ms=within_ms)
                        if dead := await self._end_unnamed_leases():
                            yield _cancelling(dead)
                        if cancelled := await self._read_cancellations():
                            yield _cancelling(cancelled)
                            continue
                        grants, reason = await self._request_grants()
                        if grants:
                            self._demand.credits = max(0, self._demand.credits - len(grants))
                            self._demand.outstanding += len(grants)
                            self._set_wait("")
                            self._told = ""
                            async for response in self._responses(grants):
                                yield response
                            continue
                        self._set_wait(reason)
                        self._wait_for_share()
                        if not await wait_for(event, self._recheck_s) and reason != self._told:
                            self._told = reason
                            yield pb.AdmitResponse(waiting_reason=reason)

    @property
    def _recheck_s(self) -> float:
        """Seconds after which the stream looks at its state again."""
        if self._roll_call.in_transit:
            return _RECHECK_S
        return min(max(_RECHECK_S, len(self._streams) / _RECHECKS_PER_S), self._roll_call.due_s)

    def _wait_for_share(self) -> None:
        """Lets the dealer know of this stream, unless it owes an answer: its next request then brings it back."""
        if self._roll_call.is_responsive:
            self._dealer.offer(self._demand)

    def _on_cancellation(self) -> None:
        self._cancellations_due = True
        self._demand.woken.set()

    async def _read_cancellations(self) -> list[Lease]:
        """Leases of groups that are not needed any more. Redis forgets them only once they have been sent."""
        if self._cancellations_due or self._sent_cancellations:
            self._cancellations_due = False
            self._sent_cancellations = await self._front.store.read_cancellations(
                self._table, self._member_id, self._generation, self._sent_cancellations
            )
        return self._sent_cancellations

    async def _end_unnamed_leases(self) -> list[Lease]:
        """Re-admits every group that the generator was granted and has not named in its inventory.

        Returns:
            Leases that it named and does not have, for instance since Redis has lost the grant.
        """
        named = self._roll_call.pop_inventory()
        if named is None:
            return []
        ended, dead = await self._front.store.end_unnamed_leases(
            self._table, self._member_id, self._generation, self._token, named
        )
        if ended:
            log.warning("%s no longer names %d groups: they go to other generators", self._member_id, ended)
        return dead

    def _set_wait(self, reason: str) -> None:
        # Free slots are no wait while responses are decoded: the generator works.
        reason = "" if self._demand.outstanding else reason
        self._front.set_wait(self._table, SAMPLES, self._member_id, reason)

    def _on_end(self) -> None:
        self._set_wait("")
        # Its share is now for others.
        self._dealer.withdraw(self._demand)
        self._dealer.settle(self._demand)

    async def _check_answers(self) -> None:
        """Ends the stream of a generator that hangs, or that nothing reaches although its connection stands.

        Groups that it gave no sign of go to others at once: its next stream would renew them for as long as it beats.

        Raises:
            UnreachableError: it has not answered for too long.
        """
        try:
            self._roll_call.check_alive()
        except UnreachableError:
            unacknowledged = self._roll_call.unacknowledged()
            await self._front.store.release(self._table, self._member_id, self._generation, unacknowledged, self._token)
            raise

    async def _request_grants(self) -> tuple[list[GroupGrant], str]:
        """Grants, or the reason for their absence; no reason if no credits are open."""
        demand = self._demand
        try:
            if self._may_ask:
                if len(self._front.fronts) > 1 and demand.outstanding:
                    await asyncio.sleep(_COURTESY_S * demand.outstanding / (demand.outstanding + demand.credits))
                async with self._front.turns.turn():
                    # Others have asked meanwhile, and the version may be another one.
                    if self._may_ask:
                        return await self._ask(min(demand.share, demand.credits))
            return [], self._refusal_here()
        finally:
            self._dealer.settle(demand)

    @property
    def _may_ask(self) -> bool:
        return not self._refusal_here() and min(self._demand.share, self._demand.credits) > 0

    def _refusal_here(self) -> str:
        """The reason why Redis is not even asked; empty where it is, or where no credits are open."""
        demand, snapshot = self._demand, self._front.store.snapshots[self._table]
        if not demand.credits:
            return ""
        if snapshot.incarnation == 0:
            return "no learner has started the run yet"
        if snapshot.suspect:
            return "Redis was restarted: waits until the learner has reported which groups it has used"
        if (refusal := self._dealer.refusal(demand.serving, snapshot)) is not None:
            return refusal.reason
        if not self._roll_call.is_responsive:
            return "this generator has not answered which groups it has received and works on"
        if demand.serving.incarnation != snapshot.incarnation:
            in_force = f"{snapshot.incarnation}:{snapshot.version}"
            return f"the weights of the run are {in_force}, this generator still has {demand.serving}"
        if demand.share:
            return ""
        if not self._dealer.room(snapshot, demand.serving):
            return self._gate_reason(snapshot)
        return "generators with less work come first"

    async def _ask(self, wanted: int) -> tuple[list[GroupGrant], str]:
        """Grants of the groups that the stream was dealt, or the reason why Redis has none."""
        store, rules, serving = self._front.store, self._rules, self._demand.serving
        snapshot = store.snapshots[self._table]
        limit = gate.live_limit(snapshot.u, serving.version, rules.groups_per_step, rules.max_staleness)
        began_ns = time.time_ns()
        answer = await store.admit(
            self._table, self._member_id, self._generation, serving, wanted, snapshot.u, limit, self._token
        )
        if answer.status == "moved":
            # The answer brought a newer snapshot: the dealer deals again.
            return [], "a new version has just come into force"
        if self._front.tracer.is_on:
            record_admissions(self._front.tracer, self._table, self._member_id, answer.grants, began_ns)
        snapshot = store.snapshots[self._table]
        reason = self._gate_reason(snapshot)
        if answer.why == "bytes":
            kept = f"{snapshot.bytes} stored and {snapshot.reserved} reserved"
            reason = f"byte budget: {kept} of {rules.max_bytes} (buffer.max_bytes)"
        if answer.why == "evaluation":
            reason = "an evaluation is under way, which goes first if buffer.max_staleness is 0"
        if len(answer.grants) < wanted:
            # Groups that it does not get may be for others, as tasks pinned to another version are.
            self._dealer.refuse(serving, Refusal(answer.rev, reason))
        return answer.grants, reason

    def _gate_reason(self, snapshot: TableSnapshot) -> str:
        if not snapshot.pending:
            return "the data has ended" if snapshot.end_of_data else "no prompt tasks are pending"
        if not self._rules.bounded:
            return f"the waiting prompts are for another version than {self._demand.serving}, which this generator has"
        rules = self._rules
        ahead = snapshot.demand + rules.samples_per_insert - 1
        floor = gate.version_floor(snapshot.u, ahead, rules.groups_per_step, rules.max_staleness)
        return (
            f"staleness bound: buffer.max_staleness ({rules.max_staleness}) allows no further prompts before version "
            f"{floor}; the one served is {self._demand.serving.version}"
        )

    async def _responses(self, grants: list[GroupGrant]) -> AsyncIterator[bytes]:
        """Grants with their prompts and drafts, serialized, in messages of bounded size."""
        store, rules = self._front.store, self._rules
        prompts = await store.images.put_back(await store.prompts(self._table, [grant.prompt for grant in grants]))
        snapshot = store.snapshots[self._table]
        floor = gate.version_floor(snapshot.u, max(0, snapshot.demand - 1), rules.groups_per_step, rules.max_staleness)
        parts: list[bytes] = []
        size = 0
        lost = []
        for grant in grants:
            if (prompt := prompts.get(grant.prompt)) is None:
                lost.append(Lease.of(grant))
                continue
            message = pb.GroupGrant(
                group_id=grant.group_id,
                lease_id=grant.lease_id,
                attempt=grant.attempt,
                lease_term_ms=rules.lease_ms,
                members_done=[i for i, flag in enumerate(grant.done) if flag == "1"],
                version_floor=max(0, floor) if rules.bounded else 0,
                parent_group_id=grant.parent,
            )
            size += len(prompt)
            for draft in grant.drafts:
                payload = await store.drafts.read(self._table, grant.group_id, draft)
                if payload is None:
                    continue
                if size >= _RESPONSE_BYTES:
                    before = pb.GroupGrant(group_id=grant.group_id, lease_id=grant.lease_id, drafts=message.drafts)
                    yield b"".join([*parts, *repeated_field(_GRANTS, [before.SerializeToString()])])
                    parts, size = [], 0
                    del message.drafts[:]
                message.drafts.add(member=draft.member, payload=payload)
                size += len(payload)
            self._roll_call.record_sent(Lease.of(grant))
            whole = (message.SerializeToString(), field_header(_TASK, len(prompt)), prompt)
            parts += (field_header(_GRANTS, sum(map(len, whole))), *whole)
            if size >= _RESPONSE_BYTES:
                yield b"".join(parts)
                parts, size = [], 0
        if lost:
            await store.fail_groups(self._table, lost)
            # The generator does not hear of these, so it still waits for as many.
            self._demand.credits += len(lost)
            self._demand.outstanding = max(0, self._demand.outstanding - len(lost))
        if parts:
            yield b"".join(parts)


def _cancelling(leases: Sequence[Lease]) -> pb.AdmitResponse:
    return pb.AdmitResponse(cancelled=[lease.to_proto() for lease in leases])
