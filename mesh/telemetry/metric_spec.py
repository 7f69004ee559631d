"""Metrics as they are declared: what documentation, dashboards and alerts are made of and checked against.

Names are Prometheus': base units, and counters end in `_total`. A name that has been released stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Kind = Literal["counter", "gauge", "histogram"]
Values = Mapping[str, Mapping[tuple[str, ...], float]]
"""Values by name of the metric (without the service) and by its labels."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """The description of a metric.

    Attributes:
        kind: counter, gauge or histogram.
        service: that has it; empty: all.
        name: without the service, and for counters without `_total`.
        labels: names of its labels.
        text: what it says.
    """

    kind: Kind
    service: str
    name: str
    labels: tuple[str, ...]
    text: str

    @property
    def family(self) -> str:
        """The name by which the client library knows it."""
        return f"rollmesh_{self.service}_{self.name}" if self.service else f"rollmesh_{self.name}"

    @property
    def full_name(self) -> str:
        """The name that Prometheus shows; of a histogram without `_bucket`, `_sum` and `_count`."""
        return f"{self.family}_total" if self.kind == "counter" else self.family

    def as_counter(self, registry: CollectorRegistry | None = None) -> Counter:
        """A counter of this description, in a registry or in none."""
        return Counter(self.family, self.text, self.labels, registry=registry)

    def as_gauge(self, registry: CollectorRegistry | None = None) -> Gauge:
        """A gauge of this description, in a registry or in none."""
        return Gauge(self.family, self.text, self.labels, registry=registry)

    def as_histogram(self, buckets: Sequence[float], registry: CollectorRegistry | None = None) -> Histogram:
        """A histogram of this description, in a registry or in none.

        Args:
            buckets: their upper bounds, in the unit of the values.
        """
        return Histogram(self.family, self.text, self.labels, buckets=buckets, registry=registry)


class SpecFactory:
    """Declares the metrics of one service."""

    def __init__(self, service: str) -> None:
        self._service = service

    def counter(self, name: str, text: str, *labels: str) -> MetricSpec:
        """A number that only grows, until its process starts again."""
        return MetricSpec("counter", self._service, name, labels, text)

    def gauge(self, name: str, text: str, *labels: str) -> MetricSpec:
        """A number that rises and falls."""
        return MetricSpec("gauge", self._service, name, labels, text)

    def histogram(self, name: str, text: str, *labels: str) -> MetricSpec:
        """A distribution of values."""
        return MetricSpec("histogram", self._service, name, labels, text)


class SpecCollector(Collector):
    """Counters and gauges with values that are read whenever Prometheus asks.

    Args:
        specs: counters and gauges.
        read: their values; one that is absent is not shown.
    """

    def __init__(self, specs: Sequence[MetricSpec], read: Callable[[], Values]) -> None:
        self._specs = specs
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Every metric of `specs`."""
        values = self._read()
        for spec in self._specs:
            family = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
            metric = family(spec.family, spec.text, labels=spec.labels)
            for labels, value in values.get(spec.name, {}).items():
                metric.add_metric(labels, value)
            yield metric
