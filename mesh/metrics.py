"""Prometheus metrics of a service: a registry of its own, served over HTTP on a free port."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import prometheus_client
from prometheus_client import CollectorRegistry, Gauge

log = logging.getLogger(__name__)


class GaugeBoard:
    """Gauges that come into being with their first value.

    Args:
        service: prefix of the names: `rollmesh_<service>_<figure>`.
    """

    def __init__(self, service: str) -> None:
        self.registry = CollectorRegistry()
        self._service = service
        self._gauges: dict[str, Gauge] = {}

    def set(self, figures: Mapping[str, float]) -> None:
        """Takes figures by name; characters that Prometheus does not know become underscores."""
        for name, value in figures.items():
            gauge = self._gauges.get(name)
            if gauge is None:
                clean = re.sub(r"[^a-zA-Z0-9_]", "_", f"rollmesh_{self._service}_{name}")
                gauge = self._gauges[name] = Gauge(clean, f"{name} as last reported", registry=self.registry)
            gauge.set(value)


@contextmanager
def metrics_server(registry: CollectorRegistry, host: str, *, enabled: bool) -> Iterator[None]:
    """Serves a registry while the context lasts, where `network.metrics` says so; the log names the address."""
    if not enabled:
        yield
        return
    server, thread = prometheus_client.start_http_server(0, addr=host, registry=registry)
    log.info("metrics at http://%s:%d/metrics", host, server.server_port)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
