"""Prometheus metrics of a service: gauges in a registry of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge


class GaugeSet:
    """Gauges that are created with their first value.

    Args:
        service: prefix of the names: `rollmesh_<service>_<name>`.
    """

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry()
        self._service = service
        self._gauges: dict[str, Gauge] = {}

    def set(self, values: Mapping[str, float]) -> None:
        """Sets gauges by name; characters that Prometheus does not allow become underscores."""
        for name, value in values.items():
            gauge = self._gauges.get(name)
            if gauge is None:
                clean = re.sub(r"[^a-zA-Z0-9_]", "_", f"rollmesh_{self._service}_{name}")
                gauge = self._gauges[name] = Gauge(clean, f"{name} as last reported", registry=self.registry)
            gauge.set(value)
