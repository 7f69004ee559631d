"""The way of finished spans to a collector.

Invariants: a service never waits for a collector, and loses nothing but spans to one that is away, slow or frozen.
Dropped ones are counted. There is one log line for the beginning of an outage, and one for its end. `close` takes a
bounded time. A forked child has no thread and sends nothing.

The SDK's own batch processor is not used: it starts a thread in every fork, and counts no drops.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from rollmesh.mesh.telemetry.metric_spec import SpecFactory
from rollmesh.mesh.telemetry.span import Span

log = logging.getLogger(__name__)
# Spans of one message; one is sent when there are as many, or after this many seconds.
_BATCH = 512
_EVERY_S = 1.0
CLOSE_S = 2.0
SPANS = SpecFactory("").counter("trace_spans", "Spans of traces by their fate: sent, dropped", "fate")


class Sender(Protocol):
    """Sends spans, in the thread of a `SpanExport`."""

    def send(self, spans: Sequence[Span]) -> str:
        """Sends spans within a bounded time; returns why they were not taken, empty where they were."""
        ...

    def abort(self) -> None:
        """Ends a call in progress, and all later ones."""
        ...


class SpanCounts(Collector):
    """The fates of spans, for Prometheus."""

    def __init__(self) -> None:
        self._spans = SPANS.as_counter()
        self.sent = self._spans.labels("sent")
        self.dropped = self._spans.labels("dropped")

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        yield from self._spans.collect()


class SpanExport:
    """A bounded queue of spans, and the thread that sends them. `put` may be called from any thread.

    Args:
        sender: sends them.
        capacity: spans that wait at most.
        counts: of their fates.
    """

    def __init__(self, sender: Sender, capacity: int, counts: SpanCounts) -> None:
        self._sender = sender
        self._capacity = capacity
        self._counts = counts
        self._waiting: deque[Span] = deque()
        self._wake = threading.Event()
        self._ends_at: float | None = None
        self._is_away = False
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def put(self, span: Span) -> None:
        """Queues a span, or drops it where too many wait."""
        waiting = len(self._waiting)
        if waiting >= self._capacity or self._ends_at is not None:
            self._counts.dropped.inc()
            return
        self._waiting.append(span)
        if waiting + 1 >= _BATCH and not self._wake.is_set():
            self._wake.set()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Sends what waits, for so many seconds at most; the rest is dropped."""
        if self._is_away:
            timeout_s = 0.0
        self._ends_at = time.monotonic() + timeout_s
        self._wake.set()
        self._thread.join(timeout_s)
        self._sender.abort()
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while self._ends_at is None:
            self._wake.wait(_EVERY_S)
            self._wake.clear()
            self._send_waiting()
        self._send_waiting()
        self._counts.dropped.inc(len(self._waiting))

    def _send_waiting(self) -> None:
        """Sends what waits now; less at the end, where the time is over."""
        for _ in range(0, len(self._waiting), _BATCH):
            if self._ends_at is not None and time.monotonic() > self._ends_at:
                return
            batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
            try:
                why = self._sender.send(batch)
            except Exception as error:  # noqa: BLE001 - whatever a library raises, the thread stays
                why = f"{type(error).__name__}: {error}"
            (self._counts.dropped if why else self._counts.sent).inc(len(batch))
            self._note(why)

    def _note(self, why: str) -> None:
        if why and not self._is_away:
            log.warning("the collector of traces does not take spans; they are dropped until it does: %s", why)
        elif self._is_away and not why:
            log.info("the collector of traces takes spans again")
        self._is_away = bool(why)
