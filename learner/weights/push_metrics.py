"""The learner's view of every push, for Prometheus: computed when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollmesh.learner.weights.push_statistics import STAGES, PushStatistics

_STAGE_HELP = (
    "Seconds from the announcement of a version to its first byte, last verified byte, service (total) and report "
    "(ack), and of the pause in decoding, over the latest versions of each receiver."
)


class PushCollector(Collector):
    """`rollmesh_learner_push_*`, by receiver.

    Args:
        pushes: of the publisher.
    """

    def __init__(self, pushes: PushStatistics) -> None:
        self._pushes = pushes

    def collect(self) -> Iterator[Metric]:
        seconds = GaugeMetricFamily(
            "rollmesh_learner_push_seconds", _STAGE_HELP, labels=["receiver", "stage", "quantile"]
        )
        done = CounterMetricFamily("rollmesh_learner_pushes", "Versions put into service.", labels=["receiver"])
        failed = CounterMetricFamily(
            "rollmesh_learner_push_failures", "Versions refused or not received.", labels=["receiver"]
        )
        received = CounterMetricFamily("rollmesh_learner_push_bytes", "Bytes received.", labels=["receiver"])
        for receiver, summary in self._pushes.by_receiver().items():
            done.add_metric([receiver], summary.count)
            failed.add_metric([receiver], summary.errors)
            received.add_metric([receiver], summary.bytes)
            for stage in STAGES:
                for quantile, values in (("0.5", summary.p50), ("0.99", summary.p99)):
                    seconds.add_metric([receiver, stage, quantile], values[stage] / 1e6)
        yield from (seconds, done, failed, received)
