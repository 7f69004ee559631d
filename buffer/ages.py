"""How long groups take and wait, as histograms of one front: each group that it leases to the learner is one value.

With several fronts the histograms of all of them add up to the run's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from buffer.policy.rules import TABLES
from buffer.records import Leased

# Milliseconds: from a tiny model's answers to an agent's hours.
_BUCKETS = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
_LABELS = (*(str(bound / 1000) for bound in _BUCKETS), "+Inf")

HISTOGRAMS = (
    ("time_to_seal_seconds", "From a group's admission to the arrival of its last member"),
    ("time_queued_seconds", "From a group's last member to its lease by the learner"),
)


class _Histogram:
    """Counts values by bucket. The library's takes a lock and a label for each value, which many groups would feel."""

    __slots__ = ("counts", "total_ms")

    def __init__(self) -> None:
        self.counts = [0] * len(_LABELS)
        self.total_ms = 0

    def take(self, value_ms: int) -> None:
        self.counts[bisect_left(_BUCKETS, value_ms)] += 1
        self.total_ms += value_ms


class QueueAges(Collector):
    """The histograms, as Prometheus collects them."""

    def __init__(self) -> None:
        self._of_table = {table: tuple([_Histogram() for _ in HISTOGRAMS]) for table in TABLES}

    def leased(self, table: str, groups: Iterable[Leased]) -> None:
        """Takes the groups of one lease."""
        sealed, queued = self._of_table[table]
        for group in groups:
            sealed.take(group.generating_ms)
            queued.take(group.queued_ms)

    def collect(self) -> Iterator[Metric]:
        """Both histograms, in seconds."""
        for index, (name, text) in enumerate(HISTOGRAMS):
            metric = HistogramMetricFamily(f"rollmesh_buffer_{name}", text, labels=["table"])
            for table, histograms in self._of_table.items():
                found = histograms[index]
                buckets = list(zip(_LABELS, accumulate(found.counts), strict=True))
                metric.add_metric([table], buckets, found.total_ms / 1000)
            yield metric
