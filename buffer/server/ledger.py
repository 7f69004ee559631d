"""The ledger: compares counters with a recount and describes every disagreement. Also the metrics of Describe.

Invariant: an impossible value is reported, never fatal. Messages show one below zero as zero; the ledger names it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, TypeVar

from rollmesh.buffer.monitoring.wait_clocks import INSERTS, SAMPLES
from rollmesh.buffer.server.front_context import FrontContext
from rollmesh.buffer.store.dead_letters import failed_group
from rollmesh.buffer.store.statistics import number_map
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import trajectory_pb2 as trajectory

K = TypeVar("K")
log = logging.getLogger(__name__)
_FATES = ("trained", "evicted_stale", "filtered", "failed")
_LIVE = ("generating", "ready", "leased", "consumed")


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
        f"{name}: the counter says {counters[name]}, which is negative"
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
    counters, recount, reasons = number_map(answer[2]), number_map(answer[3]), number_map(answer[4])
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
    if wrong := {name: value for name, value in counters.items() if value < 0}:
        log.error("values below zero, shown as zero: %s; see `rollmesh ledger`", wrong, extra={"table": table})
    statistics = await front.store.statistics.read(table, kinds=(INSERTS, SAMPLES), now_s=now_s)
    inserts, samples = statistics.waits[INSERTS], statistics.waits[SAMPLES]
    rules, fleet = front.rules[table], front.fleet
    return pb.DescribeResponse(
        table=table,
        policy=trajectory.PolicyVersion(incarnation=snapshot.incarnation, version=snapshot.version),
        next_train_version=snapshot.u,
        groups_per_step=rules.groups_per_step,
        max_staleness=rules.max_staleness,
        counts=_counts(counters, reasons),
        waiting_for_inserts_ms=inserts.ms,
        waiting_for_samples_ms=samples.ms,
        latest_checkpoint=statistics.latest_checkpoint,
        bytes=max(0, snapshot.bytes),
        learner_waits=inserts.reason,
        generators_wait=samples.reason,
        learner_lease_ms=statistics.learner_lease_ms,
        committed_version=statistics.committed,
        seeded=statistics.seeded,
        end_of_data=bool(snapshot.end_of_data),
        evicted_by_tokens=statistics.evicted_by_tokens,
        orphans_swept=statistics.values_swept,
        oldest_ready_ms=statistics.ready_age_ms,
        oldest_generating_ms=statistics.generating_age_ms,
        consumed_bytes=statistics.consumed_bytes,
        reserved_bytes=statistics.reserved_bytes,
        leases=statistics.leases,
        dead_letters=statistics.dead_letters,
        redis_used_bytes=statistics.redis_used_bytes,
        redis_max_bytes=statistics.redis_max_bytes,
        max_reuse=rules.max_reuse,
        order=rules.order.name.lower(),
        unmoved_ms=statistics.unmoved_ms,
        moved_unix_ms=statistics.moved_ms,
        generators=fleet.alive,
        generators_serving=fleet.serving,
        generators_loading=fleet.loading,
        sampled_tokens=fleet.tokens,
        unheld=max(0, snapshot.orphaned),
    )
