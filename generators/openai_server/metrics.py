"""Metrics of the endpoint for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from rollmesh.mesh.telemetry.metric_spec import SpecFactory

_GENERATOR = SpecFactory("generator")
_REQUESTS = _GENERATOR.counter(
    "endpoint_requests",
    "Calls answered, by kind (chat, text) and HTTP status; 499: the client left early",
    *("kind", "status"),
)
_TOKENS = _GENERATOR.counter(
    "endpoint_tokens", "Tokens of answered calls, by whether they were prompt or sampled", "kind"
)
_SESSIONS = _GENERATOR.gauge("endpoint_sessions", "Sessions being recorded")
_IGNORED = _GENERATOR.counter(
    "endpoint_sampling_ignored",
    "Sampling parameters of clients that were ignored because a session of training decides itself",
    "parameter",
)
METRICS = (_REQUESTS, _TOKENS, _SESSIONS, _IGNORED)


class EndpointMetrics:
    """Counts calls, tokens and sessions.

    Args:
        registry: of the generator.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = _REQUESTS.as_counter(registry)
        self.tokens = _TOKENS.as_counter(registry)
        self.sessions = _SESSIONS.as_gauge(registry)
        self.forced = _IGNORED.as_counter(registry)
