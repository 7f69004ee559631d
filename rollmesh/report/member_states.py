"""The state of a member in one word, by its last heartbeat."""

from __future__ import annotations

from rollmesh.protos import membership_pb2

# Without a heartbeat for longer, a member is likely to be gone or frozen.
_SILENT_MS = 5_000
STATES = ("working", "waits", "outdated", "starts", "asleep", "silent")
"""States of a member, the worst last."""


def member_state(member: membership_pb2.Member) -> str:
    """One of `STATES`, of a member of any role."""
    if member.heartbeat_age_ms > _SILENT_MS:
        return "silent"
    if member.gauges.get("asleep"):
        return "asleep"
    return "waits" if member.waiting_reason else "working"
