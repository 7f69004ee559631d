"""Describes which member holds which groups since when: for logs, `rollmesh status` and errors of a run that stalls."""

from __future__ import annotations

from collections.abc import Iterator

from rollmesh.protos import buffer_pb2

# Holders that are asked for where they are named: in a run of many, the rest is counted.
NAMED = 20


def describe_holders(table: buffer_pb2.DescribeResponse, held: buffer_pb2.HoldersResponse) -> str:
    """The reason why nothing moves: the holders, those that have held a group for longest first, and groups without
    one.
    """
    return "; ".join(_reasons(table, held)) or "no group is in progress"


def _reasons(table: buffer_pb2.DescribeResponse, held: buffer_pb2.HoldersResponse) -> Iterator[str]:
    yield from map(_holder, held.holders)
    if held.total > len(held.holders):
        yield f"{held.total - len(held.holders)} more hold groups"
    if table.unheld:
        yield f"{_groups(table.unheld)} of lost generators wait for another generator"
    if not held.total and not table.unheld:
        pending = table.counts.pending
        yield f"no group is in progress, {pending} prompts are waiting" if pending else "no prompt is waiting"
    if not table.generators:
        yield "no generator is in the mesh"
    elif not table.generators_serving:
        loading = f", {table.generators_loading} still load the model" if table.generators_loading else ""
        yield f"none of {table.generators} generators has weights in service{loading}"
    if table.generators_wait:
        yield f"generators wait: {table.generators_wait}"


def _holder(holder: buffer_pb2.Holder) -> str:
    place = f" at {holder.address}" if holder.address else ""
    text = (
        f"{holder.role} {holder.member_id}{place} holds {_groups(holder.groups)} "
        f"({holder.oldest_group_id} for {_seconds(holder.held_ms)})"
    )
    if not holder.address:
        return f"{text} and is not in the mesh any more"
    text += f", last heartbeat {_seconds(holder.heartbeat_age_ms)} ago"
    if not holder.stream_open:
        text += ", its stream is broken"
    return f"{text}: {holder.waiting_reason}" if holder.waiting_reason else text


def _groups(count: int) -> str:
    return "1 group" if count == 1 else f"{count} groups"


def _seconds(ms: int) -> str:
    return f"{ms / 1000:.1f} s" if ms < 10_000 else f"{ms / 1000:.0f} s"
