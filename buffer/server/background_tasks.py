"""Background tasks of a front: they end leases, evict, remove payloads, and follow the hints of other fronts.

Invariant: several fronts may run each of them at once without harm.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from functools import partial

from rollmesh.buffer.monitoring.generator_fleet import fleet_of
from rollmesh.buffer.monitoring.trajectory_spans import record_ends
from rollmesh.buffer.monitoring.wait_clocks import INSERTS, SAMPLES
from rollmesh.buffer.server.change_notifier import wait_for
from rollmesh.buffer.server.front_context import FrontContext
from rollmesh.buffer.server.membership import fronts_of, read_members, reading_interval_s
from rollmesh.buffer.store.statistics import WaitTotal
from rollmesh.mesh.errors import StoreError, UnreachableError
from rollmesh.mesh.runtime.task_group import run_together
from rollmesh.mesh.tables import EVAL, TABLES

log = logging.getLogger(__name__)
# Leases are at least a second; their end is noticed within this time.
SWEEP_S = 0.25
# The members are read this often, or more rarely where there are thousands.
_MEMBERS_S = 1.0
_RECONNECT_S = 0.5
# Seconds between two readings of a table that other fronts change all the time. For a shorter time (`HINT_MS` in
# lua/lib/common.lua) Redis leaves changes without a hint.
_HINTS_S = 0.03
# Without any news a table is read again after this many seconds.
_RECHECK_S = 1.0
# Without any news the values of ended groups are looked for again after this many seconds.
_ENDED_S = 2.0
# A stored value is removed once it has had no owner for this long; also the time between two walks over the keys.
_UNOWNED_AGE_S = 60.0
# Side data that belongs to no live group stays for this long.
_SIDE_AGE_S = 3600.0


async def expire_leases(front: FrontContext) -> None:
    """Ends leases that ran out, and reports the wait clocks, at intervals."""
    while True:
        try:
            for table in TABLES:
                ended, returned, restarted = await front.store.expire(table, front.membership.member_ttl_ms)
                if restarted:
                    log.warning("Redis is new or was restarted: every lease gets a full term", extra={"table": table})
                if ended or returned:
                    log.info("leases ended: %d generating, %d leased", ended, returned, extra={"table": table})
                await _report_waits(front, table)
            front.outage.job_passed("sweep")
        except StoreError as error:
            front.outage.job_failed("sweep", error)
        await asyncio.sleep(SWEEP_S)


async def read_fleet(front: FrontContext) -> None:
    """Keeps the list of fronts, and the state of all generators, up to date."""
    while True:
        pause_s = _MEMBERS_S
        try:
            members, _ = await read_members(front)
            front.fleet, front.fronts = fleet_of(members), fronts_of(members)
            pause_s = reading_interval_s(len(members), _MEMBERS_S)
            front.outage.job_passed("reading the members")
        except StoreError as error:
            front.outage.job_failed("reading the members", error)
        await asyncio.sleep(pause_s)


async def _report_waits(front: FrontContext, table: str) -> None:
    clocks = front.wait_clocks[table]
    waits = {kind: WaitTotal(clocks.drain_ms(kind), clocks.reason(kind)) for kind in (INSERTS, SAMPLES)}
    await front.store.statistics.add_waits(table, waits, now_s=time.time())


async def deal_admissions(front: FrontContext, table: str) -> None:
    """Deals what may be admitted among the streams of a table, and wakes those whose groups were cancelled."""
    dealer, streams, seen = front.dealers[table], front.admit_streams[table], 0
    rules, evaluating = front.rules[table], False
    watched = (table, EVAL) if rules.waits_for_evaluation else (table,)
    with front.changes.subscribe(*watched) as event:
        dealer.on_offer = event.set
        while True:
            event.clear()
            snapshot = front.store.snapshots[table]
            if rules.waits_for_evaluation:
                before, evaluating = evaluating, front.store.snapshots[EVAL].has_unclaimed
                if before and not evaluating:
                    dealer.forget_refusals()
            dealer.deal(snapshot)
            try:
                if snapshot.cancelled < seen:
                    # Redis went back: who had been notified is not known.
                    streams.wake_all()
                elif snapshot.cancelled > seen:
                    streams.wake(await front.store.cancelled_since(table, seen))
                seen = snapshot.cancelled
                if not await wait_for(event, _RECHECK_S):
                    dealer.forget_refusals()
                    await front.store.refresh(table)
                front.outage.job_passed(f"admitting to {table}")
            except StoreError as error:
                front.outage.job_failed(f"admitting to {table}", error)
                await asyncio.sleep(_RECONNECT_S)


async def evict(front: FrontContext, table: str) -> None:
    """Ends groups as soon as they are over the bound."""
    with front.changes.subscribe(table) as event:
        while True:
            event.clear()
            snapshot = front.store.snapshots[table]
            try:
                if snapshot.first_deadline < snapshot.u:
                    evicted = await front.store.evict(table)
                    log.info("evicted %d groups over the bound", len(evicted), extra={"table": table})
                    if front.tracer.is_on:
                        record_ends(front.tracer, table, "evicted_stale", evicted)
                front.outage.job_passed(f"evicting in {table}")
            except StoreError as error:
                front.outage.job_failed(f"evicting in {table}", error)
            await wait_for(event, _RECHECK_S)


async def remove_ended_values(front: FrontContext) -> None:
    """Removes payloads, drafts and prompts of ended groups."""
    with front.changes.subscribe(TABLES[0]) as event:
        while True:
            event.clear()
            for table in TABLES:
                try:
                    await front.store.remove_ended_values(table)
                    front.outage.job_passed(f"collecting payloads of {table}")
                except StoreError as error:
                    front.outage.job_failed(f"collecting payloads of {table}", error)
            await wait_for(event, _ENDED_S)
            # Several ends make one round.
            await asyncio.sleep(SWEEP_S)


async def sweep_side_files(front: FrontContext) -> None:
    """Removes side data that belongs to no live group, and unfinished uploads."""
    while True:
        for table in TABLES:
            try:
                removed = await front.store.side.sweep(table, partial(front.store.alive, table), _SIDE_AGE_S)
                if removed:
                    log.warning("removed %d leftovers of side data", removed, extra={"table": table})
            except StoreError as error:
                log.warning("sweeping side data: %s", error)
        await asyncio.sleep(_SIDE_AGE_S / 2)


async def sweep_stored_values(front: FrontContext) -> None:
    """Removes stored values that no group owns; one front at a time walks over the keys."""
    while True:
        await asyncio.sleep(_UNOWNED_AGE_S)
        for table in TABLES:
            try:
                swept = await front.store.sweep_unowned(table, age_s=_UNOWNED_AGE_S)
                if swept:
                    log.warning("removed %d stored values that no group owned", swept, extra={"table": table})
            except StoreError as error:
                log.warning("sweeping stored values: %s", error)


async def follow_hints(front: FrontContext) -> None:
    """Follows the hints of other fronts. After every (re)connection all tables are read again."""
    while True:
        followers = {table: _HintFollower(front, table) for table in TABLES}
        try:
            async with front.store.subscribe_hints() as hints:
                for table in TABLES:
                    await front.store.refresh(table)
                front.outage.job_passed("listening to other fronts")
                await run_together(_pass_on(hints, followers), *(follower.run() for follower in followers.values()))
        except (StoreError, UnreachableError) as error:
            front.outage.job_failed("listening to other fronts", error)
            await asyncio.sleep(_RECONNECT_S)


async def _pass_on(hints: AsyncIterator[tuple[str, int]], followers: Mapping[str, _HintFollower]) -> None:
    async for table, rev in hints:
        if table in followers:
            followers[table].note(rev)
    raise StoreError("Redis has ended the subscription to hints", hint="it is opened again")


class _HintFollower:
    """Reads a table as soon as another front has changed it, and no more often than `_HINTS_S` says.

    Else each front would pay for all changes of all others, and more fronts would take no work off one another. Changes
    shortly after a hint send none, so the table is read once more after the last hint.
    """

    def __init__(self, front: FrontContext, table: str) -> None:
        self._store = front.store
        self._table = table
        self._rev = 0
        self._noted = asyncio.Event()

    def note(self, rev: int) -> None:
        """Records that the table has reached a revision."""
        self._rev = rev
        self._noted.set()

    async def run(self) -> None:
        """Reads the table until cancelled.

        Raises:
            StoreError: Redis is away.
        """
        while True:
            await self._noted.wait()
            self._noted.clear()
            if self._rev > self._store.snapshots[self._table].rev:
                await self._store.refresh(self._table)
            await asyncio.sleep(_HINTS_S)
            if not self._noted.is_set():
                await self._store.refresh(self._table)
