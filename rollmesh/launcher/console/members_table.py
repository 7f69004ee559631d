"""The members of a mesh as a table; many generators are summed, except those in trouble."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from rollmesh.protos import membership_pb2
from rollmesh.report.member_states import STATES, member_state

_ROLES = {
    membership_pb2.ROLE_LEARNER: "learner",
    membership_pb2.ROLE_GENERATOR: "generator",
    membership_pb2.ROLE_REWARD: "reward",
    membership_pb2.ROLE_BUFFER: "buffer",
    membership_pb2.ROLE_MODEL: "model",
}
# Columns of a terminal from which all of a member is shown.
WIDE = 140
MOST = 16
"""Members of a role that have a row each; more are summed."""
Members = Sequence[membership_pb2.Member]


def members_table(everyone: Members, columns: int = WIDE, *, every: bool = False) -> Table:
    """The members of the mesh as a table.

    Args:
        everyone: the members.
        columns: of the terminal; in a narrow one the member's id stands for its role, and versions are short.
        every: each member has a row of its own, however many there are.
    """
    wide = columns >= WIDE
    table = Table(box=None, padding=(0, 2) if wide else (0, 1))
    endpoints = any(member.endpoint for member in everyone)
    titles = ["member", "role", "address", "serves", "tokens/s", "heartbeat", "waits for"]
    for title in titles if wide else [title for title in titles if title != "role"]:
        table.add_column(title, overflow="fold")
    if endpoints:
        table.add_column("endpoint", overflow="fold")
    for role in sorted({member.role for member in everyone}):
        of_role = sorted((each for each in everyone if each.role == role), key=lambda each: each.member_id)
        for row in [[each] for each in of_role] if every else rows_of(of_role):
            speeds = [each.gauges["tokens_per_second"] for each in row if "tokens_per_second" in each.gauges]
            first, alone = row[0], len(row) == 1
            reasons = {each.waiting_reason for each in row}
            table.add_row(
                first.member_id if alone else _title(row),
                *([_ROLES.get(first.role, "?")] if wide else []),
                (first.address or "-") if alone else "-",
                serving_text(first, wide=wide) if alone else version_range(row),
                f"{sum(speeds):.0f}" if speeds else "-",
                f"{max(each.heartbeat_age_ms for each in row) / 1000:.1f} s",
                (first.waiting_reason or "-") if len(reasons) == 1 else f"{len(reasons)} reasons",
                *([f"{first.endpoint}/v1" if alone and first.endpoint else "-"] if endpoints else []),
            )
    return table


def rows_of(members: Members) -> list[list[membership_pb2.Member]]:
    """The members of one role in rows, the worst first: one each, or those in one state together where there are many.

    A row has those of one state, version and reason. Silent members have a row each. Where there are more than `MOST`
    rows, the last one has the rest.
    """
    if len(members) <= MOST:
        return [[member] for member in members]
    found: dict[tuple[object, ...], list[membership_pb2.Member]] = {}
    for member in members:
        state = member_state(member)
        policy = member.serving
        key = (-STATES.index(state), policy.incarnation, policy.version, member.waiting_reason)
        found.setdefault((*key, member.member_id if state == "silent" else ""), []).append(member)
    rows = [row for _, row in sorted(found.items(), key=lambda item: (item[0][0], len(item[1])))]
    rest = [member for row in rows[MOST - 1 :] for member in row]
    return rows if len(rows) <= MOST else [*rows[: MOST - 1], rest]


def serving_text(member: membership_pb2.Member, *, wide: bool) -> str:
    """The version that a member serves, in words or in short; or the rung on which it runs programs of the model."""
    policy = member.serving
    if rung := member.gauges.get("reward_isolation_rung"):
        return f"programs on rung {rung:.0f}" if wide else f"rung {rung:.0f}"
    if not policy.incarnation:
        return "-"
    return f"version {policy.version} (incarnation {policy.incarnation})" if wide else f"v{policy.version}"


def version_range(members: Members) -> str:
    """The versions that members serve, in short."""
    found = [member.serving.version for member in members if member.serving.incarnation]
    if not found:
        return "-"
    return f"v{min(found)}" if min(found) == max(found) else f"v{min(found)}-{max(found)}"


def _title(row: Members) -> str:
    states = {member_state(member) for member in row}
    return f"{len(row)} {states.pop()}" if len(states) == 1 else f"{len(row)} others"
