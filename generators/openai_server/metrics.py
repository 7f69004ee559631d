"""Metrics of the endpoint for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class EndpointMetrics:
    """Counts calls, tokens and sessions.

    Args:
        registry: of the generator.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "rollmesh_generator_endpoint_requests",
            "Calls answered, by kind (chat, text) and HTTP status; 499: the client left early.",
            ["kind", "status"],
            registry=registry,
        )
        self.tokens = Counter(
            "rollmesh_generator_endpoint_tokens",
            "Tokens of answered calls, by whether they were prompt or sampled.",
            ["kind"],
            registry=registry,
        )
        self.sessions = Gauge("rollmesh_generator_endpoint_sessions", "Sessions being recorded.", registry=registry)
        self.forced = Counter(
            "rollmesh_generator_endpoint_sampling_ignored",
            "Sampling parameters of clients that were ignored because a session of training decides itself.",
            ["parameter"],
            registry=registry,
        )
