"""The buffer's part of the traces: admission, storage, the wait for the learner, and groups that end here.

Nothing here is called where there are no traces.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from rollmesh.buffer.store.records import EndedGroup, GroupGrant, Leased, Write, WriteOutcome
from rollmesh.mesh.telemetry.span import Value
from rollmesh.mesh.telemetry.trace_ids import ROOT
from rollmesh.mesh.telemetry.tracing import Tracer
from rollmesh.protos import buffer_pb2 as pb

_PREFIX = "WRITE_STATUS_"


def record_admissions(tracer: Tracer, table: str, generator: str, grants: Iterable[GroupGrant], since_ns: int) -> None:
    """`admit`: a group is granted, once per attempt, for each member that has no outcome yet."""
    now_ns = time.time_ns()
    for grant in grants:
        attributes: dict[str, Value] = {
            "table": table,
            "group": grant.group_id,
            "generator": generator,
            "attempt": grant.attempt,
        }
        for member, done in enumerate(grant.done):
            if done == "0" and (trace := tracer.trajectory(grant.group_id, member)) is not None:
                trace.record("admit", since_ns, now_ns, {**attributes, "member": member}, number=grant.attempt)


def record_writes(
    tracer: Tracer, table: str, writes: Sequence[Write], outcomes: Sequence[WriteOutcome], since_ns: int
) -> None:
    """`store`: a member's outcome is stored, or refused; it lies in the generator's `write`.

    Where the write has sealed a group that failed thereby, its trajectories end.
    """
    now_ns = time.time_ns()
    for write, outcome in zip(writes, outcomes, strict=True):
        if write.draft or (trace := tracer.trajectory(write.group_id, write.member)) is None:
            continue
        status = pb.WriteStatus.Name(outcome.status).removeprefix(_PREFIX).lower()
        attributes: dict[str, Value] = {"status": status, "bytes": write.size, "sealed": outcome.sealed}
        trace.record(
            "store", since_ns, now_ns, attributes, number=write.attempt, inside=("write", write.attempt),
        )  # fmt: skip
    record_ends(tracer, table, "failed", [outcome.failed for outcome in outcomes if outcome.failed is not None])


def record_leases(tracer: Tracer, leased: Iterable[Leased]) -> None:
    """`queue`: the time from a group's seal to its lease by the learner."""
    now_ns = time.time_ns()
    for group in leased:
        attributes = {"for_version": group.for_version, "use": group.use}
        for member in range(len(group.metas)):
            if (trace := tracer.trajectory(group.group_id, member)) is not None:
                sealed_ns = now_ns - group.queued_ms * 1_000_000
                trace.record("queue", sealed_ns, now_ns, attributes, number=group.use)


def record_ends(tracer: Tracer, table: str, fate: str, groups: Iterable[EndedGroup]) -> None:
    """The whole trajectory, which ends untrained: `fate` is evicted_stale or failed."""
    now_ns = time.time_ns()
    for group in groups:
        admitted_ns = now_ns - group.age_ms * 1_000_000
        attributes = {"table": table, "group": group.group_id, "fate": fate, "reason": group.reason}
        for member in range(group.members):
            if (trace := tracer.trajectory(group.group_id, member)) is not None:
                failure = group.reason if fate == "failed" else ""
                trace.record(ROOT, admitted_ns, now_ns, {**attributes, "member": member}, failure=failure)
