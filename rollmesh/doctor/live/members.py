"""The members of a mesh, as they report themselves: present or silent, and their waits."""

from __future__ import annotations

from collections.abc import Iterator

from rollmesh.doctor.findings import Finding, note, ok, problem, warning
from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.mesh.access.token_file import GRANT_GAUGE
from rollmesh.mesh.membership import ASLEEP
from rollmesh.protos import buffer_pb2, membership_pb2

CHECK, STALLS, GRANTS, REDIS = "members", "stalls", "grants", "redis"
_DAY_S = 86400.0
_SILENT = "silent for"
_FULL = 0.9
# Versions by which a generator may be older than the newest one while it fetches.
_LAG = 2


def judge_members(snapshot: Snapshot, before: Snapshot) -> Iterator[Finding]:
    """Findings about members and what holds the mesh up.

    Args:
        snapshot: of the mesh.
        before: some seconds earlier, longer than heartbeats are apart.
    """
    if snapshot.table is None:
        yield problem(
            CHECK, f"the mesh does not answer: {snapshot.trouble}", "is the buffer running, the address right?"
        )
        return
    found = [*_missing(snapshot), *_silent(snapshot), *_outdated(snapshot, before)]
    yield from found
    if not found:
        roles = [membership_pb2.Role.Name(member.role).removeprefix("ROLE_").lower() for member in snapshot.members]
        counts = ", ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles))
        yield ok(CHECK, f"{counts}; {snapshot.who_waits()}")
    if stall := snapshot.stall():
        yield problem(
            STALLS,
            f"nothing has moved {stall}",
            "the service that is named holds the groups: its log says what it does",
        )
    yield from _grants(snapshot)
    yield from judge_redis(snapshot.table)


def _missing(snapshot: Snapshot) -> Iterator[Finding]:
    if snapshot.run_finished:
        yield note(CHECK, "the run has finished")
        return
    if not snapshot.generators():
        yield problem(
            CHECK,
            "there is no generator: nothing is sampled",
            "`rollmesh generator --mesh HOST:PORT --token-file FILE` on a machine that reaches the buffer",
        )
    if not snapshot.learners():
        yield problem(
            CHECK,
            f"{snapshot.absent_learner()}: nothing is trained",
            "start it (`rollmesh learner cfg.yaml --mesh HOST:PORT`); learner.log says why the last one ended",
        )
    reasons = {member.wait_cause: member.waiting_reason for member in snapshot.members}
    if membership_pb2.WAIT_CAUSE_NO_REWARD_SERVICE in reasons:
        yield problem(
            CHECK,
            "no reward service answers: finished responses fail when their time is over",
            "`rollmesh reward cfg.yaml --mesh HOST:PORT`, or correct reward.endpoints (see reachability)",
        )
    if overdue := reasons.get(membership_pb2.WAIT_CAUSE_REWARD_OVERDUE):
        yield problem(
            CHECK,
            f"reward functions take longer than their limit: {overdue}",
            "a larger reward.scorer_timeout_s (with reward.timeout_s and rollout.reward_wait_s above it), or more "
            "reward.workers",
        )


def _silent(snapshot: Snapshot) -> Iterator[Finding]:
    for member in snapshot.members:
        if member.waiting_reason.startswith(_SILENT):
            yield warning(
                CHECK,
                f"{member.member_id} ({member.address}) is {member.waiting_reason}",
                "is its host up, and its process running? Its groups go to others when its lease ends",
                heartbeat_age_s=member.heartbeat_age_ms / 1000,
            )


def _outdated(snapshot: Snapshot, before: Snapshot) -> Iterator[Finding]:
    """Generators that have taken no version between two looks, though there were some."""
    assert snapshot.table is not None, "the mesh has answered"
    version = snapshot.table.policy.version
    served = {member.member_id: member.serving for member in before.generators()}
    for member in snapshot.generators():
        stood = member.serving.incarnation and served.get(member.member_id) == member.serving
        if stood and version - member.serving.version > _LAG and not member.gauges.get(ASLEEP):
            yield warning(
                CHECK,
                f"{member.member_id} still serves version {member.serving.version}, and {version} is in force",
                "its log says why weights do not come; `rollmesh status` shows its transfers (table of pushes)",
                lag=version - member.serving.version,
            )


def _grants(snapshot: Snapshot) -> Iterator[Finding]:
    for member in snapshot.members:
        left_s = member.gauges.get(GRANT_GAUGE)
        if left_s is not None and left_s < _DAY_S:
            yield warning(
                GRANTS,
                f"the grant of {member.member_id} ends in {left_s / 3600:.1f} h",
                "`rollmesh token grant ROLE`, and put it into that node's token file before: it is read again",
                seconds_left=left_s,
            )


def judge_redis(table: buffer_pb2.DescribeResponse) -> Iterator[Finding]:
    """Judges the memory of Redis.

    Args:
        table: counts, as a front describes them.
    """
    used, most = table.redis_used_bytes, table.redis_max_bytes
    text = f"{used / 2**20:.0f} MiB in use" + (f" of {most / 2**20:.0f}" if most else "")
    if most and used > _FULL * most:
        yield problem(
            REDIS,
            f"Redis is almost full: {text}",
            f"`redis-cli CONFIG SET maxmemory {2 * most}`, or a lower buffer.max_bytes; a checkpoint commits used "
            "groups, which frees their bytes",
            used_bytes=used,
            max_bytes=most,
        )
    else:
        yield ok(REDIS, text)
