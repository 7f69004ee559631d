"""How long groups take and wait, as histograms of one front: each group that it leases to the learner is one value.

With several fronts the histograms of all of them add up to the run's.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram

from buffer.records import Leased

# Seconds: from a tiny model's answers to an agent's hours.
_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)

HISTOGRAMS = (
    ("time_to_seal_seconds", "From a group's admission to the arrival of its last member"),
    ("time_queued_seconds", "From a group's last member to its lease by the learner"),
)


class QueueAges:
    """The histograms, in a registry of their own.

    Attributes:
        registry: holds them.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._sealed, self._queued = (
            Histogram(f"rollmesh_buffer_{name}", text, ["table"], buckets=_BUCKETS, registry=self.registry)
            for name, text in HISTOGRAMS
        )

    def leased(self, table: str, groups: Iterable[Leased]) -> None:
        """Takes the groups of one lease."""
        for group in groups:
            self._sealed.labels(table).observe(group.generating_ms / 1e3)
            self._queued.labels(table).observe(group.queued_ms / 1e3)
