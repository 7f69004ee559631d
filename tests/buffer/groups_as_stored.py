"""A group of the machine as the verbs store it."""

from __future__ import annotations

from rollmesh.buffer.reference_model.group_states import Group

# Members whose payloads are in pieces, and how many.
PIECES = {1: 3}
DIGEST = "0123456789abcdef"


def place_of(member: int) -> str:
    """A verb's note of a member's payload, after member and attempt."""
    return DIGEST + (f":{PIECES[member]}" if member in PIECES else "")


def fields_of(group: Group) -> dict[str, str | int | bool]:
    """Fields of its record that the machine knows as well."""
    return {
        "state": group.state.value,
        "ordinal": group.task.ordinal,
        "holder": group.holder,
        "lease": group.lease,
        "attempt": group.attempt,
        "lost": group.lost,
        "done": "".join("1" if flag else "0" for flag in group.done),
        "bytes": group.bytes,
        "ranges": str(group.ranges),
        "payloads": ",".join(f"{m}:{a}:{place_of(m)}" for m, a in group.payloads),
        "deadline": group.deadline,
        "order": group.order,
    }
