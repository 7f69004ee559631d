"""The learner's standing Sample stream: credits come in, leased groups go out in the order the policy chooses."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from rollmesh.buffer.monitoring.wait_clocks import INSERTS
from rollmesh.buffer.policy.batch_selection import Choice, choose_first, choose_in_order
from rollmesh.buffer.policy.rules import TRAIN, Order
from rollmesh.buffer.protocol.leases import LEARNER, Lease, leases_of
from rollmesh.buffer.server.change_notifier import wait_for
from rollmesh.buffer.server.custom_score import Ranking
from rollmesh.buffer.server.lease_roll_call import RollCall
from rollmesh.buffer.server.sample_messages import messages_of
from rollmesh.buffer.server.server_state import FrontContext, StreamHold, pump
from rollmesh.buffer.store.errors import fenced, lost_state, unknown_incarnation
from rollmesh.buffer.store.records import Awaited, Leased, Outlook
from rollmesh.buffer.store.table_snapshot import TableView
from rollmesh.mesh.errors import StoreError
from rollmesh.mesh.trajectory.versions import checked_version
from rollmesh.protos import buffer_pb2 as pb

_log = logging.getLogger(__name__)
_RECHECK_S = 1.0
# Ready groups wait for this long at most for what is being written at the same moment.
_GATHER_S = 0.005
# Candidates looked at together; a batch of more is gathered in several turns.
_CANDIDATES_AT_MOST = 2048


@dataclass(slots=True)
class _Wish:
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
        self._table = front.checked_table(first.table)
        self._rules = front.rules[self._table]
        self._incarnation = first.incarnation
        self._with_payloads = first.with_payloads
        self._token = ""
        # A batch may take longer than a term on its way: only what the learner owes an answer to is judged.
        self._roll = RollCall(self._rules.lease_ms / 1000, math.inf)
        self._recheck_s = min(_RECHECK_S, self._roll.question_s)
        self._wishes: deque[_Wish] = deque()
        score = front.score if self._rules.order is Order.SCORE else None
        self._ranking = Ranking(score) if score is not None else None
        self._take(first)

    def _take(self, request: pb.SampleRequest) -> None:
        self._roll.note_request(
            request.received, leases_of(request.inventory) if request.HasField("inventory") else None
        )
        if request.credits:
            self._wishes.append(_Wish(checked_version("for_version", request.for_version), request.credits))

    async def run(self, requests: AsyncIterator[pb.SampleRequest]) -> AsyncIterator[pb.SampleResponse | bytes]:
        """Answers until the learner closes the stream."""
        store = self._front.store
        async with StreamHold(self._front, self._table, LEARNER, self._over) as hold:
            self._token = hold.token
            held = await store.attach_learner(self._table, self._incarnation, hold.token)
            async for response in self._responses(held):
                yield response
            with self._front.bell.listening(self._table) as event:
                async with pump(requests, self._take, event) as reader:
                    while not reader.done():
                        event.clear()
                        self._roll.check_alive()
                        if within_ms := self._roll.ask_if_due():
                            yield pb.SampleResponse(inventory_within_ms=within_ms)
                        if lost := await self._keep_named():
                            refs = [pb.LeaseRef(group_id=group_id, lease_id=lease) for group_id, lease in lost]
                            yield pb.SampleResponse(lost=refs)
                        leased, reason = await self._next(event)
                        if leased:
                            self._stop_clock()
                            async for response in self._responses(leased):
                                yield response
                            continue
                        if self._wishes and store.views[self._table].exhausted:
                            self._wishes.clear()
                            self._stop_clock()
                            yield pb.SampleResponse(exhausted=True, waiting_reason="the data has ended")
                            continue
                        self._run_clock(reason)
                        self._await_writes()
                        if not await wait_for(event, self._recheck_s):
                            await store.refresh(self._table)
                            if reason:
                                yield pb.SampleResponse(waiting_reason=reason)

    async def _keep_named(self) -> list[Lease]:
        """Where the learner has said what it holds: what it does not know of is ready again.

        Returns:
            What it has named and does not have.
        """
        store = self._front.store
        store.awaited.pop(self._table, None)
        if self._table in store.handing or self._table in store.handed:
            # Writes lease to this stream what has not been sent yet: it is looked at after that.
            return []
        named = self._roll.take_named()
        if named is None:
            return []
        ended, lost = await store.keep_named(self._table, LEARNER, self._incarnation, self._token, named)
        if ended:
            _log.warning(
                "the learner has forgotten %d groups, which are ready again", ended, extra={"table": self._table}
            )
        return lost

    def _run_clock(self, reason: str) -> None:
        if reason and self._table == TRAIN:
            self._front.waits[self._table].begin(INSERTS, LEARNER, reason)
        else:
            self._stop_clock()

    def _stop_clock(self) -> None:
        self._front.waits[self._table].end(INSERTS, LEARNER)

    def _over(self) -> None:
        self._stop_clock()
        awaited = self._front.store.awaited.get(self._table)
        if awaited is not None and awaited.token == self._token:
            del self._front.store.awaited[self._table]

    def _await_writes(self) -> None:
        """Offers to take what the next write seals: first come, first served needs no look at what else there is."""
        store, wishes = self._front.store, self._wishes
        view = store.views[self._table]
        if self._rules.order is not Order.FIFO or view.ready or not wishes or wishes[0].version != view.u:
            store.awaited.pop(self._table, None)
            return
        wish = wishes[0]
        store.awaited[self._table] = Awaited(self._incarnation, wish.version, wish.credits, self._token)

    def _handed(self) -> list[Leased]:
        """What writes have leased to this stream.

        Raises:
            StoreError: it is not known what: the stream has to begin anew, which offers all that is leased.
        """
        found: list[Leased] = []
        for handed in self._front.store.handed.pop(self._table, ()):
            # What was leased to a stream before this one has been offered when this one began.
            if handed.to.token != self._token:
                continue
            if handed.leased is None:
                raise StoreError("an answer of Redis was lost", hint="the stream is opened again by itself")
            if self._wishes and self._wishes[0].version == handed.to.version:
                self._counted(self._wishes[0], handed.leased)
            found += handed.leased
        return found

    async def _next(self, event: asyncio.Event) -> tuple[list[Leased], str]:
        """Groups leased now, or why there are none; no reason where nothing is wanted."""
        self._front.store.awaited.pop(self._table, None)
        handed = self._handed()
        return (handed, "") if handed else await self._try(event)

    async def _try(self, event: asyncio.Event) -> tuple[list[Leased], str]:
        """As `_next`, apart from what was handed over."""
        view = self._front.store.views[self._table]
        if view.incarnation > self._incarnation:
            raise fenced()
        if view.suspect:
            raise lost_state()
        if view.incarnation < self._incarnation:
            raise unknown_incarnation()
        if self._rules.bounded and any(wish.version < view.u for wish in self._wishes):
            # Not by what was seen last: Redis may have lost the claim since, and the wish is one for its repetition.
            view = await self._front.store.refresh(self._table)
            self._wishes = deque(wish for wish in self._wishes if wish.version >= view.u)
        if not self._wishes:
            return [], ""
        wish = self._wishes[0]
        view = await self._gathered(wish, view, event)
        if not view.ready:
            return [], self._waiting(view)
        leased = await self._at_hand(wish, view)
        if leased:
            return self._counted(wish, leased), ""
        outlook = await self._front.store.peek(self._table, wish.version, self._candidates(wish))
        if self._ranking is not None:
            outlook = await self._ranked(self._ranking, outlook)
        choice, reason = self._choose(wish, view, outlook)
        if not choice.group_ids:
            return [], reason
        leased = await self._front.store.sample(
            self._table, self._incarnation, wish.version, choice.group_ids, self._token
        )
        return self._counted(wish, leased), "another front was faster"

    def _counted(self, wish: _Wish, leased: list[Leased]) -> list[Leased]:
        self._front.ages.leased(self._table, leased)
        wish.credits -= len(leased)
        if wish.credits <= 0:
            self._wishes.popleft()
        return leased

    async def _at_hand(self, wish: _Wish, view: TableView) -> list[Leased]:
        """Leases all ready groups where this front has just sealed them: first come, first served needs no look."""
        store, rules = self._front.store, self._rules
        sealed = store.sealed.pop(self._table, None)
        if sealed is None or sealed.rev != view.rev or len(sealed.group_ids) != view.ready:
            return []
        # For a later version it would have to be seen whether the batches before it are full.
        if rules.order is not Order.FIFO or wish.version != view.u or view.ready > wish.credits:
            return []
        return await store.sample(self._table, self._incarnation, wish.version, sealed.group_ids, self._token)

    async def _gathered(self, wish: _Wish, view: TableView, event: asyncio.Event) -> TableView:
        """The figures; while writes are under way, after a short wait for what they seal.

        Under load this makes full messages of what would be many small ones. A lone group waits for nothing.
        """
        store, loop = self._front.store, asyncio.get_running_loop()
        until = loop.time() + _GATHER_S
        while 0 < view.ready < wish.credits and store.writing:
            event.clear()
            if not await wait_for(event, until - loop.time()):
                break
            view = store.views[self._table]
        return view

    def _candidates(self, wish: _Wish) -> int:
        rules = self._rules
        if self._ranking is not None:
            # All that the gate lets become ready, within reason.
            return min(_CANDIDATES_AT_MOST, (rules.max_staleness + 1) * rules.groups_per_step)
        return min(_CANDIDATES_AT_MOST, wish.credits + rules.groups_per_step // 2)

    async def _ranked(self, ranking: Ranking, outlook: Outlook) -> Outlook:
        unknown = ranking.unknown(outlook.candidates)
        if unknown:
            ranking.learn(await self._front.store.facts(self._table, unknown))
        return replace(outlook, candidates=tuple(ranking.ranked(outlook.candidates)))

    def _choose(self, wish: _Wish, view: TableView, outlook: Outlook) -> tuple[Choice, str]:
        rules = self._rules
        if not rules.bounded:
            return choose_first(outlook.candidates, version=wish.version, slots=wish.credits), "nothing is ready"
        if outlook.earlier < rules.groups_per_step * (wish.version - view.u):
            return Choice((), 0), f"version {wish.version} comes after the batch of version {view.u}"
        free = rules.groups_per_step - outlook.taken
        if free <= 0:
            return Choice((), 0), f"the batch of version {wish.version} is leased in full"
        if rules.order is not Order.IN_ORDER:
            choice = choose_first(outlook.candidates, version=wish.version, slots=min(free, wish.credits))
            return choice, "what is ready is over the staleness bound"
        choice = choose_in_order(
            outlook.candidates,
            outlook.live_by_deadline,
            version=wish.version,
            groups_per_step=rules.groups_per_step,
            free=free,
            wanted=wish.credits,
        )
        if choice.reserved:
            return choice, (
                f"waits for stragglers: {choice.reserved} ready groups may not overtake groups still being generated, "
                f"which must train by version {view.first_deadline} at the latest"
            )
        return choice, "what is ready is over the staleness bound"

    def _waiting(self, view: TableView) -> str:
        fleet = self._front.fleet
        text = (
            f"waits for groups: {view.generating} being generated, {view.pending} tasks pending, "
            f"{fleet.alive} generators alive"
        )
        return f"{text}; a generator says: {fleet.reason}" if fleet.reason else text

    async def _responses(self, leased: Sequence[Leased]) -> AsyncIterator[bytes]:
        """Groups as they travel; those that cannot end as failed, and others are to come in their place."""
        unsendable: dict[str, list[Lease]] = {}
        async for message in messages_of(
            self._front, self._table, leased, self._roll, unsendable, with_payloads=self._with_payloads
        ):
            yield message
        for reason, leases in unsendable.items():
            await self._front.store.lose(self._table, leases, reason)
            self._wishes.appendleft(_Wish(leased[0].for_version, len(leases)))


async def sample_stream(
    front: FrontContext, requests: AsyncIterator[pb.SampleRequest]
) -> AsyncIterator[pb.SampleResponse | bytes]:
    """The Sample handler."""
    first = await anext(aiter(requests), None)
    if first is None:
        return
    async for response in SampleSession(front, first).run(requests):
        yield response
