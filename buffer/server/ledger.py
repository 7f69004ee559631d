"""The ledger: compares counters with a recount and words every disagreement. Also the metrics of Describe.

Invariant: an impossible value is reported, never fatal. Messages show one below zero as zero; the ledger says what it
is.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from rollmesh.buffer.monitoring.dead_letters import failed_group
from rollmesh.buffer.policy.rules import TABLES
from rollmesh.buffer.server.server_state import FrontContext
from rollmesh.mesh.errors import StoreError
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import trajectory_pb2 as trajectory

K = TypeVar("K")
log = logging.getLogger(__name__)
_FATES = ("trained", "evicted_stale", "filtered", "failed")
_LIVE = ("generating", "ready", "leased", "consumed")
# A reason of a wait that no front has confirmed for so many seconds is over.
_REASON_AGE_S = 3


def _number_map(flat: Sequence[Any]) -> dict[str, int]:
    found = {}
    for name, value in zip(flat[::2], flat[1::2], strict=True):
        try:
            found[name.decode()] = int(value)
        except ValueError:
            log.error("Redis has %r where %s should be a number", value, name.decode())
            raise StoreError(
                f"the value {name.decode()} in Redis is damaged: {value!r} is no number",
                hint="no verb writes that: what else has access to this Redis? start from a backup, or begin a new run",
            ) from None
    return found


def discrepancies(counters: Mapping[str, int], recount: Mapping[str, int]) -> list[str]:
    """Disagreements of counters, recount and the conservation laws, in words."""
    found = [
        f"{name}: the counter says {counters[name]}, the recount {recount[name]}"
        for name in sorted(recount)
        if counters[name] != recount[name]
    ]
    ended = sum(counters[fate] for fate in _FATES) + sum(counters[state] for state in _LIVE)
    if counters["admitted"] != ended:
        found.append(f"admitted: {counters['admitted']} groups were admitted, fates and states add up to {ended}")
    found += [
        f"{name}: the counter says {counters[name]}, which is less than nothing"
        for name in sorted(counters)
        if counters[name] < 0
    ]
    tasks = counters["pending"] + counters["withdrawn"] + counters["first_admissions"]
    if counters["seeded_tasks"] != tasks:
        found.append(f"seeded_tasks: {counters['seeded_tasks']} were seeded, {tasks} are accounted for")
    return found


def _counts(values: Mapping[str, int], reasons: Mapping[str, int]) -> pb.LedgerCounts:
    return pb.LedgerCounts(reasons=_at_least_zero(reasons), **_at_least_zero(values))


def _at_least_zero(values: Mapping[K, int]) -> dict[K, int]:
    return {name: max(0, value) for name, value in values.items()}


async def _read(
    front: FrontContext, table: str, limit: int
) -> tuple[dict[str, int], dict[str, int], dict[str, int], Any]:
    answer = await front.store.ledger(table, limit)
    counters, recount, reasons = _number_map(answer[2]), _number_map(answer[3]), _number_map(answer[4])
    # Every fate is counted a second time under its reason.
    for fate in _FATES:
        recount[fate] = sum(count for name, count in reasons.items() if name.startswith(f"{fate}/"))
    recount["first_admissions"] = recount["admitted"]
    recount["seeded_tasks"] = recount["pending"] + counters["withdrawn"] + recount["first_admissions"]
    return counters, recount, reasons, answer[5]


async def ledger(front: FrontContext, table: str, failed_limit: int) -> pb.LedgerResponse:
    """Recounts a table."""
    counters, recount, reasons, failures = await _read(front, table, failed_limit)
    unchecked = {name: value for name, value in counters.items() if name not in recount}
    response = pb.LedgerResponse(
        counters=_counts(counters, reasons),
        recounted=_counts({**unchecked, **recount}, reasons),
        discrepancies=discrepancies(counters, recount),
    )
    response.failed.extend(failed_group(note) for note in failures)
    return response


async def describe(front: FrontContext, table: str, *, now_s: float) -> pb.DescribeResponse:
    """Metrics of a table."""
    counters, _, reasons, _ = await _read(front, table, 0)
    snapshot = front.store.snapshots[table]
    keys = front.store.keys
    if wrong := {name: value for name, value in counters.items() if value < 0}:
        log.error("values below zero, shown as zero: %s; see `rollmesh ledger`", wrong, extra={"table": table})
    ages = await front.store.redis.run_script("queue_ages", table)
    generating_age, ready_age, leases, dead, consumed_bytes, reserved, seeded = (max(0, value) for value in ages[1:])
    (latest, committed, until), flat, swept, lengths, (seconds, micros), memory, *moved = await front.store.redis.batch(
        [
            ("HMGET", keys.run, "latest", "committed", "learner_until"),
            ("HGETALL", keys.table(table, "waits")),
            ("HGET", keys.table(table), "orphans_swept"),
            ("HGETALL", keys.table(table, "evicted_tokens")),
            ("TIME",),
            ("INFO", "memory"),
            *(("HGET", keys.table(name), "moved_ms") for name in TABLES),
        ]
    )
    waits: dict[bytes, bytes] = dict(zip(flat[::2], flat[1::2], strict=True))

    def reason(kind: bytes) -> str:
        at, _, text = waits.get(kind + b"_reason", b"0 ").decode().partition(" ")
        return text if now_s - int(at) <= _REASON_AGE_S else ""

    rules, fleet = front.rules[table], front.fleet
    now_ms = int(seconds) * 1000 + int(micros) // 1000
    moved_ms = max(int(at or 0) for at in moved)
    return pb.DescribeResponse(
        table=table,
        policy=trajectory.PolicyVersion(incarnation=snapshot.incarnation, version=snapshot.version),
        next_train_version=snapshot.u,
        groups_per_step=rules.groups_per_step,
        max_staleness=rules.max_staleness,
        counts=_counts(counters, reasons),
        waiting_for_inserts_ms=int(waits.get(b"inserts_ms", 0)),
        waiting_for_samples_ms=int(waits.get(b"samples_ms", 0)),
        latest_checkpoint=(latest or b"").decode(),
        bytes=max(0, snapshot.bytes),
        learner_waits=reason(b"inserts"),
        generators_wait=reason(b"samples"),
        learner_lease_ms=max(0, int(float(until or 0)) - now_ms),
        committed_version=int(committed or 0),
        seeded=seeded,
        end_of_data=bool(snapshot.end_of_data),
        evicted_by_tokens={int(bound): count for bound, count in _number_map(lengths).items()},
        orphans_swept=int(swept or 0),
        oldest_ready_ms=ready_age,
        oldest_generating_ms=generating_age,
        consumed_bytes=consumed_bytes,
        reserved_bytes=reserved,
        leases=leases,
        dead_letters=dead,
        redis_used_bytes=_info(memory, "used_memory"),
        redis_max_bytes=_info(memory, "maxmemory"),
        max_reuse=rules.max_reuse,
        order=rules.order.name.lower(),
        unmoved_ms=max(0, now_ms - moved_ms) if moved_ms else 0,
        moved_unix_ms=moved_ms,
        generators=fleet.alive,
        generators_serving=fleet.serving,
        generators_loading=fleet.loading,
        sampled_tokens=fleet.tokens,
        unheld=max(0, snapshot.orphaned),
    )


def _info(text: bytes, name: str) -> int:
    """One number of Redis' INFO; 0 where it is not there."""
    found = re.search(rf"^{name}:(\d+)", text.decode(), re.MULTILINE)
    return int(found[1]) if found else 0
