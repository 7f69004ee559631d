"""Background tasks of a front: they end leases, evict, remove payloads, and follow the hints of other fronts.

Invariant: several fronts may run each of them at once without harm.
"""

from __future__ import annotations

import asyncio
import logging
import time
from functools import partial

from rollmesh.buffer.monitoring.generator_fleet import fleet_of
from rollmesh.buffer.monitoring.wait_clocks import INSERTS, SAMPLES
from rollmesh.buffer.policy.rules import TABLES
from rollmesh.buffer.server.change_notifier import wait_for
from rollmesh.buffer.server.membership import fronts_of, read_members
from rollmesh.buffer.server.server_state import FrontContext
from rollmesh.buffer.store.orphan_sweep import sweep_orphans
from rollmesh.mesh.errors import StoreError

log = logging.getLogger(__name__)
# Leases are at least a second; their end is noticed within this time.
SWEEP_S = 0.25
# Every this many rounds, the members are read.
_MEMBERS_EVERY = 4
_RECONNECT_S = 0.5
# A stored value is removed once it has had no owner for this long; also the time between two walks over the keys.
_ORPHAN_AGE_S = 60.0
# Side data that belongs to no live group stays for this long.
_SIDE_AGE_S = 3600.0


async def expire_leases(front: FrontContext) -> None:
    """Ends leases that ran out, and reports the wait clocks, at intervals."""
    rounds = 0
    while True:
        try:
            if rounds % _MEMBERS_EVERY == 0:
                await _refresh_members(front)
            rounds += 1
            for table in TABLES:
                ended, returned, restarted = await front.store.expire(table, front.member_ttl_ms)
                if restarted:
                    log.warning("Redis is new or was restarted: every lease has a full term", extra={"table": table})
                if ended or returned:
                    log.info("leases ended: %d generating, %d leased", ended, returned, extra={"table": table})
                await _report_waits(front, table)
            front.outage.job_passed("sweep")
        except StoreError as error:
            front.outage.job_failed("sweep", error)
        await asyncio.sleep(SWEEP_S)


async def _refresh_members(front: FrontContext) -> None:
    members, _ = await read_members(front)
    front.fleet = fleet_of(members)
    front.fronts = fronts_of(members)


async def _report_waits(front: FrontContext, table: str) -> None:
    waits = front.wait_clocks[table]
    key = front.store.keys.table(table, "waits")
    commands: list[tuple[str | int, ...]] = []
    for kind in (INSERTS, SAMPLES):
        waited, reason = waits.drain_ms(kind), waits.reason(kind)
        if waited:
            commands.append(("HINCRBY", key, f"{kind}_ms", waited))
            # Stamped, because the reason of a front that dies stays.
            commands.append(("HSET", key, f"{kind}_reason", f"{int(time.time()) if reason else 0} {reason}"))
    await front.store.redis.batch(commands)


async def evict(front: FrontContext, table: str) -> None:
    """Ends groups as soon as they are over the bound."""
    with front.changes.subscribe(table) as event:
        while True:
            event.clear()
            snapshot = front.store.snapshots[table]
            try:
                if snapshot.first_deadline < snapshot.u:
                    count = await front.store.evict(table)
                    log.info("evicted %d groups over the bound", count, extra={"table": table})
                front.outage.job_passed(f"evicting in {table}")
            except StoreError as error:
                front.outage.job_failed(f"evicting in {table}", error)
            await wait_for(event, 1.0)


async def collect_garbage(front: FrontContext) -> None:
    """Removes payloads of ended groups."""
    with front.changes.subscribe(TABLES[0]) as event:
        while True:
            event.clear()
            for table in TABLES:
                try:
                    await front.store.collect_trash(table)
                    front.outage.job_passed(f"collecting payloads of {table}")
                except StoreError as error:
                    front.outage.job_failed(f"collecting payloads of {table}", error)
            await wait_for(event, 2.0)
            # Several ends make one round.
            await asyncio.sleep(SWEEP_S)


async def sweep_side_files(front: FrontContext) -> None:
    """Removes side data that belongs to no live group, and what uploads left unfinished."""
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
    keys = front.store.keys
    while True:
        await asyncio.sleep(_ORPHAN_AGE_S)
        for table in TABLES:
            try:
                lock = ("SET", keys.table(table, "sweeping"), 1, "NX", "PX", int(_ORPHAN_AGE_S * 1000))
                if (await front.store.redis.batch([lock]))[0] is None:
                    continue
                swept = await sweep_orphans(front.store.redis, keys, table, age_s=_ORPHAN_AGE_S)
                if swept:
                    log.warning("removed %d stored values that no group owned", swept, extra={"table": table})
            except StoreError as error:
                log.warning("sweeping stored values: %s", error)


async def follow_hints(front: FrontContext) -> None:
    """Follows the hints of other fronts. After every (re)connection all tables are read again."""
    while True:
        try:
            async with front.store.redis.subscribed(front.store.keys.wake) as subscription:
                for table in TABLES:
                    await front.store.refresh(table)
                front.outage.job_passed("listening to other fronts")
                async for message in subscription.listen():
                    await _apply_hint(front, message["data"])
        except StoreError as error:
            front.outage.job_failed("listening to other fronts", error)
            await asyncio.sleep(_RECONNECT_S)


async def _apply_hint(front: FrontContext, data: bytes) -> None:
    table, rev = data.decode().split()
    if table in front.store.snapshots and int(rev) > front.store.snapshots[table].rev:
        await front.store.refresh(table)
