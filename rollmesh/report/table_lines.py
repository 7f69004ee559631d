"""A table of the buffer in a few lines for a reader, and as plain values for a program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message

from rollmesh.protos import buffer_pb2

_UNITS = ("B", "kB", "MB", "GB", "TB")
_FINE = frozenset({"trained/committed"})


def format_bytes(count: float) -> str:
    """Bytes with a unit."""
    power = 0
    while count >= 1000 and power < len(_UNITS) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.0f} {_UNITS[power]}" if power == 0 or count >= 100 else f"{count:.1f} {_UNITS[power]}"


def format_ms(ms: float) -> str:
    """Milliseconds with a unit."""
    seconds = ms / 1e3
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def table_lines(table: buffer_pb2.DescribeResponse) -> Iterator[tuple[str, str]]:
    """(title, text) of each line; lines about troubles only where there are any."""
    counts = table.counts
    yield (
        "waited",
        f"learner {format_ms(table.waiting_for_inserts_ms)} for groups, "
        f"generators {format_ms(table.waiting_for_samples_ms)} for permission to begin a group (in all)",
    )
    yield (
        "queue",
        f"{counts.ready} ready, oldest {format_ms(table.oldest_ready_ms)}; {counts.generating} being generated, oldest "
        f"{format_ms(table.oldest_generating_ms)}; {counts.pending} prompts waiting; "
        f"{table.leases} held by a generator or the learner; order {table.order or '-'}",
    )
    limit = f"of {format_bytes(table.redis_max_bytes)}" if table.redis_max_bytes else "without limit"
    yield (
        "bytes",
        f"payloads {format_bytes(table.bytes)} ({format_bytes(table.consumed_bytes)} of trained groups), "
        f"{format_bytes(table.reserved_bytes)} set aside for groups being generated; "
        f"Redis {format_bytes(table.redis_used_bytes)} {limit}",
    )
    if table.max_reuse > 1:
        yield "uses", f"{counts.uses}, at most {table.max_reuse} of a group"
    reasons = [f"{_end(reason)} {count}" for reason, count in sorted(counts.reasons.items()) if reason not in _FINE]
    if reasons:
        yield "ended", ", ".join(reasons)
    if table.evicted_by_tokens:
        classes = sorted(table.evicted_by_tokens.items())
        yield "evicted", "by tokens: " + ", ".join(f"up to {bound} {count}" for bound, count in classes)
    odd = {
        "given to another generator": counts.readmissions,
        "cancelled": counts.cancelled,
        "responses refused as superseded": counts.superseded_writes,
        "responses written twice": counts.duplicate_writes,
        "values without a group removed": table.orphans_swept,
        "failed groups kept with their causes": table.dead_letters,
        "their prompts queued again": counts.redriven,
    }
    if any(odd.values()):
        yield "repairs", ", ".join(f"{name} {count}" for name, count in odd.items() if count)


def _end(reason: str) -> str:
    """An end `FATE/REASON` in words: `failed (too few scored)`."""
    fate, _, why = reason.partition("/")
    return f"{fate} ({why.replace('_', ' ')})" if why else fate


def message_to_dict(message: Message) -> dict[str, Any]:
    """A message with all its fields, numbers as numbers, maps as objects with text keys."""
    return {field.name: _plain(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        return message_to_dict(value)
    if isinstance(value, str | int | float | bool):
        return value
    if hasattr(value, "items"):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value]
