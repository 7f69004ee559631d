"""A front's Prometheus metrics: groups by state and fate, waiting clocks, ages, bytes, leases, versions.

Most are the table's or Redis' own, and the same at every front. With several fronts, take one value (`max`), not their
sum. The histograms are the front's (see `buffer.monitoring.queue_latency`). So are its waiting generators and writes in
progress.
`METRICS` is the whole list, from which docs/metrics.md is generated.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.registry import CollectorRegistry

from rollmesh.buffer.monitoring.queue_latency import HISTOGRAMS
from rollmesh.buffer.monitoring.wait_clocks import SAMPLES
from rollmesh.buffer.server.front_context import FrontContext
from rollmesh.buffer.server.ledger import describe
from rollmesh.buffer.server.membership import read_members, reading_interval_s
from rollmesh.mesh.access.token_file import GRANT_GAUGE
from rollmesh.mesh.errors import StoreError
from rollmesh.mesh.tables import TABLES, TRAIN
from rollmesh.mesh.telemetry.metric_spec import SpecCollector, SpecFactory
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import membership_pb2

_INTERVAL_S = 2.0
_STATES = ("generating", "ready", "leased", "consumed")
_BUFFER = SpecFactory("buffer")
_counter, _gauge = _BUFFER.counter, _BUFFER.gauge

METRICS = (
    _counter("groups_admitted", "Groups ever admitted", "table"),
    _counter("groups_ended", "Groups by fate and its reason", "table", "fate", "reason"),
    _counter("groups_readmitted", "Groups admitted again after their holder was lost", "table"),
    _counter("groups_cancelled", "Groups cancelled at their generator while being generated", "table"),
    _counter("groups_redriven", "Prompts of failed groups queued again on request", "table"),
    _counter("evicted_by_tokens", "Groups evicted, by the class (upper bound) of their tokens", "table", "tokens"),
    _counter("tasks_seeded", "Prompt tasks ever seeded", "table"),
    _counter("tasks_withdrawn", "Prompt tasks taken back before admission", "table"),
    _counter("writes_superseded", "Members refused because a later attempt holds the group, or it has ended", "table"),
    _counter("writes_duplicate", "Repeated writes of a stored member", "table"),
    _counter("orphans_swept", "Stored values that belonged to no live group, removed", "table"),
    _counter("waiting_for_inserts_seconds", "Time the learner waited for groups with credits", "table"),
    _counter(
        "waiting_for_samples_seconds",
        "Time generators waited at the gate, decoding nothing of the table, summed",
        "table",
    ),
    _gauge("groups", "Live groups by state", "table", "state"),
    _gauge("uses", "Uses of groups claimed and not undone by a resume", "table"),
    _gauge("leases", "Groups that a generator or the learner holds", "table"),
    _gauge("dead_letters", "Failed groups kept with their cause (`rollmesh ledger --failed`)", "table"),
    _gauge("tasks_pending", "Prompt tasks not admitted yet", "table"),
    _gauge("oldest_ready_seconds", "Age since sealing of the oldest of the groups next in order", "table"),
    _gauge("oldest_generating_seconds", "Age since admission of the oldest group being generated", "table"),
    _gauge("unmoved_seconds", "Time since a group of any table last made progress"),
    _gauge("payload_bytes", "Payload bytes stored", "table"),
    _gauge("consumed_bytes", "Payload bytes of consumed groups, their commit pending", "table"),
    _gauge("reserved_bytes", "Payload bytes set aside for groups being generated", "table"),
    _gauge("policy_version", "The version in force"),
    _gauge("policy_incarnation", "The learner's incarnation"),
    _gauge("committed_version", "Uses below this version are durable"),
    _gauge("members", "Members by role", "role"),
    _gauge("grant_seconds_left", "Time until the first grant of such a member ends, where one has an end", "role"),
    _gauge("redis_used_memory_bytes", "Memory of Redis"),
    _gauge("redis_max_memory_bytes", "Memory above which Redis refuses writes; 0: no limit"),
    _gauge(
        "generators_waiting", "Generators that wait at the gate of this front, and decode nothing of the table", "table"
    ),
    _gauge("writes_in_progress", "Messages of members that this front has not stored yet"),
    *HISTOGRAMS,
)


@dataclass
class MetricsSnapshot:
    """The values that were read last.

    Attributes:
        front: what is read.
        tables: descriptions by table.
        members: number by role.
        grants: seconds until the first of their grants ends, by role.
    """

    front: FrontContext
    tables: dict[str, pb.DescribeResponse] = field(default_factory=dict)
    members: dict[str, int] = field(default_factory=dict)
    grants: dict[str, float] = field(default_factory=dict)

    async def read(self) -> None:
        """Reads everything again.

        Raises:
            StoreError: Redis is away; the values stay as they were.
        """
        for table in TABLES:
            self.tables[table] = await describe(self.front, table, now_s=time.time())
        everyone, _ = await read_members(self.front)
        roles = [membership_pb2.Role.Name(member.role).removeprefix("ROLE_").lower() for member in everyone]
        self.members = {role: roles.count(role) for role in ("learner", "generator", "reward", "buffer")}
        self.grants = {}
        for role, member in zip(roles, everyone, strict=True):
            if GRANT_GAUGE in member.gauges:
                left_s = member.gauges[GRANT_GAUGE]
                self.grants[role] = min(left_s, self.grants.get(role, left_s))


def registry_of(snapshot: MetricsSnapshot) -> CollectorRegistry:
    """The registry that a front exports."""
    registry = CollectorRegistry()
    registry.register(snapshot.front.queue_latency)
    specs = [spec for spec in METRICS if spec.kind != "histogram"]
    registry.register(SpecCollector(specs, lambda: metric_values(snapshot)))
    return registry


def metric_values(snapshot: MetricsSnapshot) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by metric and labels."""
    found: dict[str, dict[tuple[str, ...], float]] = {spec.name: {} for spec in METRICS}
    for table, described in snapshot.tables.items():
        for name, value in _plain(described).items():
            found[name][(table,)] = value
        for state in _STATES:
            found["groups"][(table, state)] = getattr(described.counts, state)
        for reason, count in described.counts.reasons.items():
            fate, _, why = reason.partition("/")
            found["groups_ended"][(table, fate, why)] = count
        for tokens, count in described.evicted_by_tokens.items():
            found["evicted_by_tokens"][(table, str(tokens))] = count
    if TRAIN in snapshot.tables:
        train = snapshot.tables[TRAIN]
        found["policy_version"][()] = train.policy.version
        found["policy_incarnation"][()] = train.policy.incarnation
        found["committed_version"][()] = train.committed_version
        found["unmoved_seconds"][()] = train.unmoved_ms / 1e3
        found["redis_used_memory_bytes"][()] = train.redis_used_bytes
        found["redis_max_memory_bytes"][()] = train.redis_max_bytes
    front = snapshot.front
    for table in TABLES:
        found["generators_waiting"][(table,)] = front.wait_clocks[table].waiting(SAMPLES)
    found["writes_in_progress"][()] = front.store.handoff.writes_in_progress
    found["members"] = {(role,): count for role, count in snapshot.members.items()}
    found["grant_seconds_left"] = {(role,): left_s for role, left_s in snapshot.grants.items()}
    return found


def _plain(described: pb.DescribeResponse) -> Mapping[str, float]:
    counts: Any = described.counts
    return {
        "groups_admitted": counts.admitted,
        "groups_readmitted": counts.readmissions,
        "groups_cancelled": counts.cancelled,
        "groups_redriven": counts.redriven,
        "tasks_seeded": counts.seeded_tasks,
        "tasks_withdrawn": counts.withdrawn,
        "writes_superseded": counts.superseded_writes,
        "writes_duplicate": counts.duplicate_writes,
        "orphans_swept": described.orphans_swept,
        "waiting_for_inserts_seconds": described.waiting_for_inserts_ms / 1e3,
        "waiting_for_samples_seconds": described.waiting_for_samples_ms / 1e3,
        "uses": counts.uses,
        "leases": described.leases,
        "dead_letters": described.dead_letters,
        "tasks_pending": counts.pending,
        "oldest_ready_seconds": described.oldest_ready_ms / 1e3,
        "oldest_generating_seconds": described.oldest_generating_ms / 1e3,
        "payload_bytes": described.bytes,
        "consumed_bytes": described.consumed_bytes,
        "reserved_bytes": described.reserved_bytes,
    }


async def refresh_forever(snapshot: MetricsSnapshot) -> None:
    """Refreshes the snapshot at intervals."""
    while True:
        # The sweep reports when Redis is away.
        with contextlib.suppress(StoreError):
            await snapshot.read()
        await asyncio.sleep(reading_interval_s(sum(snapshot.members.values()), _INTERVAL_S))
