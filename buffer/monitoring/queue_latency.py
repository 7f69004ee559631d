"""Histograms of how long groups take and wait. Each group that a front leases to the learner is one value.

With several fronts the histograms of all of them add up to the run's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from rollmesh.buffer.store.records import Leased
from rollmesh.mesh.tables import TABLES
from rollmesh.mesh.telemetry.metric_spec import SpecFactory

# Seconds: from a tiny model's answers to an agent's hours.
_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)

_BUFFER = SpecFactory("buffer")
HISTOGRAMS = (
    _BUFFER.histogram(
        "time_to_seal_seconds", "From a group's admission to the arrival of its last member; leased here", "table"
    ),
    _BUFFER.histogram(
        "time_queued_seconds", "From a group's last member to its lease by the learner; leased here", "table"
    ),
)


class QueueLatency(Collector):
    """The histograms, as Prometheus collects them."""

    def __init__(self) -> None:
        self._histograms = [spec.as_histogram(_BUCKETS) for spec in HISTOGRAMS]
        # Looking a label up costs more than counting a value.
        self._of_table = {table: tuple([each.labels(table) for each in self._histograms]) for table in TABLES}

    def observe(self, table: str, groups: Iterable[Leased]) -> None:
        """Records groups that were just leased."""
        sealed, queued = self._of_table[table]
        for group in groups:
            sealed.observe(group.generating_ms / 1e3)
            queued.observe(group.queued_ms / 1e3)

    def collect(self) -> Iterator[Metric]:
        """Both histograms, in seconds."""
        for histogram in self._histograms:
            yield from histogram.collect()
