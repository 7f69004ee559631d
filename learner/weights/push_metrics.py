"""The learner's view of every push, for Prometheus: computed when it is asked for."""

from __future__ import annotations

from rollmesh.learner.weights.push_statistics import STAGES, PushStatistics
from rollmesh.mesh.telemetry.metric_spec import SpecCollector, SpecFactory, Values

_LEARNER = SpecFactory("learner")
_SECONDS = _LEARNER.gauge(
    "push_seconds",
    "From a version's announcement to each stage at a receiver, and the decoding pause, over its latest versions",
    *("receiver", "stage", "quantile"),
)
_DONE = _LEARNER.counter("pushes", "Versions put into service", "receiver")
_FAILED = _LEARNER.counter("push_failures", "Versions refused or not received", "receiver")
_BYTES = _LEARNER.counter("push_bytes", "Bytes received", "receiver")
_PENDING = _LEARNER.gauge("pushes_pending", "Receivers that have not put the newest version into service")
METRICS = (_SECONDS, _DONE, _FAILED, _BYTES, _PENDING)
_QUANTILES = ("0.5", "0.99")


def push_collector(pushes: PushStatistics) -> SpecCollector:
    """`rollmesh_learner_push*`, by receiver.

    Args:
        pushes: of the publisher.
    """

    def read() -> Values:
        summaries = pushes.by_receiver()
        return {
            _SECONDS.name: {
                (receiver, stage, quantile): values[stage] / 1e6
                for receiver, summary in summaries.items()
                for quantile, values in zip(_QUANTILES, (summary.p50, summary.p99), strict=True)
                for stage in STAGES
            },
            _DONE.name: {(receiver,): summary.count for receiver, summary in summaries.items()},
            _FAILED.name: {(receiver,): summary.errors for receiver, summary in summaries.items()},
            _BYTES.name: {(receiver,): summary.bytes for receiver, summary in summaries.items()},
            _PENDING.name: {(): pushes.pending()},
        }

    return SpecCollector(METRICS, read)
