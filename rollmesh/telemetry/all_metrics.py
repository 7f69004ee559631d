"""Every metric that a service shows to Prometheus."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollmesh.buffer.server.metrics import METRICS as BUFFER
from rollmesh.generators.metrics import METRICS as GENERATOR
from rollmesh.learner.metrics.prometheus import METRICS as LEARNER
from rollmesh.mesh.http.process_metrics import METRICS as EVERY_SERVICE
from rollmesh.mesh.telemetry.metric_spec import MetricSpec
from rollmesh.reward_service.server.metrics import METRICS as REWARD

METRICS: Mapping[str, Sequence[MetricSpec]] = {
    "Every service": EVERY_SERVICE,
    "Buffer": BUFFER,
    "Learner": LEARNER,
    "Generator": GENERATOR,
    "Reward service": REWARD,
}
"""By service, in the order of the documentation."""


def metric_of(full_name: str) -> MetricSpec:
    """The metric of a name as Prometheus shows it; for a histogram also with `_bucket`, `_sum` or `_count`.

    Raises:
        KeyError: there is none.
    """
    for metrics in METRICS.values():
        for spec in metrics:
            series = [spec.full_name]
            if spec.kind == "histogram":
                series += [f"{spec.full_name}_{part}" for part in ("bucket", "sum", "count")]
            if full_name in series:
                return spec
    raise KeyError(full_name)
