"""Finished spans, as services report them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Event:
    """A moment within a span; `at_ns` is Unix time."""

    name: str
    at_ns: int
    attributes: Attributes


@dataclass(slots=True)  # not frozen: that doubles the time of making one
class Span:
    """A span that has ended.

    Attributes:
        name: what was done.
        trace_id, span_id: see `trace_ids`.
        parent_id: the span that it lies in; None for a trace's root.
        began_ns, ended_ns: Unix time.
        attributes: without the prefix `rollmesh.`.
        events: moments within it.
        link: trace and span to which it is related; None: none.
        failure: why it failed; empty where it did not.
    """

    name: str
    trace_id: int
    span_id: int
    parent_id: int | None
    began_ns: int
    ended_ns: int
    attributes: Attributes
    events: Sequence[Event]
    link: tuple[int, int] | None
    failure: str
