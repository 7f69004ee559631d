"""A table of the buffer in a few lines for a reader, and as plain values for a program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message

from rollmesh.protos import buffer_pb2

_UNITS = ("B", "kB", "MB", "GB", "TB")
_FINE = frozenset({"trained/committed"})


def size(count: float) -> str:
    """Bytes as a reader likes them."""
    power = 0
    while count >= 1000 and power < len(_UNITS) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.0f} {_UNITS[power]}" if power == 0 or count >= 100 else f"{count:.1f} {_UNITS[power]}"


def duration(ms: float) -> str:
    """Milliseconds as a reader likes them."""
    seconds = ms / 1e3
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def table_lines(table: buffer_pb2.DescribeResponse) -> Iterator[tuple[str, str]]:
    """(title, text) of what there is to say; lines about troubles only where there are any."""
    counts = table.counts
    yield (
        "waited",
        f"learner {duration(table.waiting_for_inserts_ms)} for groups, "
        f"generators {duration(table.waiting_for_samples_ms)} at the gate (in all)",
    )
    yield (
        "queue",
        f"{counts.ready} ready, oldest {duration(table.oldest_ready_ms)}; {counts.generating} being generated, oldest "
        f"{duration(table.oldest_generating_ms)}; {counts.pending} prompts waiting; {table.leases} leases; "
        f"order {table.order or '-'}",
    )
    limit = f"of {size(table.redis_max_bytes)}" if table.redis_max_bytes else "without limit"
    yield (
        "bytes",
        f"payloads {size(table.bytes)} (consumed {size(table.consumed_bytes)}), reserved "
        f"{size(table.reserved_bytes)}; Redis {size(table.redis_used_bytes)} {limit}",
    )
    if table.max_reuse > 1:
        yield "uses", f"{counts.uses}, at most {table.max_reuse} of a group"
    reasons = [f"{reason} {count}" for reason, count in sorted(counts.reasons.items()) if reason not in _FINE]
    if reasons:
        yield "ended", ", ".join(reasons)
    if table.evicted_by_tokens:
        classes = sorted(table.evicted_by_tokens.items())
        yield "evicted", "by tokens: " + ", ".join(f"up to {bound} {count}" for bound, count in classes)
    odd = {
        "admitted again": counts.readmissions,
        "cancelled": counts.cancelled,
        "superseded writes": counts.superseded_writes,
        "duplicate writes": counts.duplicate_writes,
        "orphans swept": table.orphans_swept,
        "dead letters": table.dead_letters,
        "redriven": counts.redriven,
    }
    if any(odd.values()):
        yield "repairs", ", ".join(f"{name} {count}" for name, count in odd.items() if count)


def plain(message: Message) -> dict[str, Any]:
    """A message with all its fields, numbers as numbers, maps as objects with text keys."""
    return {field.name: _plain(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, str | int | float | bool):
        return value
    if hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value]
