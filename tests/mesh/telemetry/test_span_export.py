"""Spans on their way: what a sender that is slow, away or frozen costs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

import pytest

from rollmesh.mesh.telemetry.span import Span
from rollmesh.mesh.telemetry.span_export import SpanCounts, SpanExport

_DEADLINE_S = 60.0


class FakeSender:
    """Takes spans as long as `open` is set, and refuses them while `why` says so; `raises` is for the next call."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.asked = threading.Semaphore(0)
        self.why = ""
        self.raises: Exception | None = None
        self.aborted = False
        self.sent: list[Span] = []

    def send(self, spans: Sequence[Span]) -> str:
        # Read before the test hears of the call, and changes them.
        why, raises, self.raises = self.why, self.raises, None
        self.asked.release()
        self.open.wait(_DEADLINE_S)
        if raises is not None:
            raise raises
        if not (why or self.aborted):
            self.sent += spans
        return why or ("aborted" if self.aborted else "")

    def abort(self) -> None:
        self.aborted = not self.open.is_set()
        self.open.set()


def span(number: int) -> Span:
    return Span("write", 1, number, None, 0, 1, {}, (), None, "")


def opened(capacity: int = 100) -> tuple[FakeSender, SpanExport, SpanCounts]:
    sender, counts = FakeSender(), SpanCounts()
    return sender, SpanExport(sender, capacity, counts), counts


def fates(counts: SpanCounts) -> tuple[float, float]:
    """Sent, dropped."""
    values = {s.labels["fate"]: s.value for m in counts.collect() for s in m.samples if s.name.endswith("_total")}
    return values["sent"], values["dropped"]


def test_what_waits_is_sent_before_the_end() -> None:
    sender, export, counts = opened(capacity=2000)
    for number in range(1200):
        export.put(span(number))
    export.close(_DEADLINE_S)
    assert [each.span_id for each in sender.sent] == list(range(1200))
    assert fates(counts) == (1200, 0)


def test_a_frozen_collector_costs_spans_alone() -> None:
    sender, export, counts = opened(capacity=10)
    sender.open.clear()
    export.put(span(0))
    assert sender.asked.acquire(timeout=_DEADLINE_S), "the thread is inside the call"
    began = time.thread_time()
    for number in range(1000):
        export.put(span(number))
    assert time.thread_time() - began < 1.0, "no put waits"
    export.close(0.0)
    # Eleven had been taken: they are lost too, and counted.
    assert fates(counts) == (0, 1001)
    export.put(span(0))
    assert fates(counts) == (0, 1002), "after the end"


def test_an_outage_is_two_lines_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sender, export, counts = opened()
    sender.why = "connection refused"
    for number in range(3):
        export.put(span(number))
        assert sender.asked.acquire(timeout=_DEADLINE_S)
    sender.why = ""
    export.put(span(4))
    assert sender.asked.acquire(timeout=_DEADLINE_S)
    export.close(_DEADLINE_S)
    lines = [record.getMessage() for record in caplog.records if "collector" in record.getMessage()]
    assert len(lines) == 2, lines
    assert "connection refused" in lines[0]
    assert fates(counts) == (1, 3)


def test_whatever_a_library_raises_the_next_spans_are_sent() -> None:
    sender, export, counts = opened()
    sender.raises = ValueError("cannot invoke RPC on closed channel")
    export.put(span(0))
    assert sender.asked.acquire(timeout=_DEADLINE_S)
    export.put(span(1))
    assert sender.asked.acquire(timeout=_DEADLINE_S)
    export.close(_DEADLINE_S)
    assert [each.span_id for each in sender.sent] == [1]
    assert fates(counts) == (1, 1)
