"""The configuration of traces."""

from __future__ import annotations

from pydantic import Field, field_validator

from rollmesh.mesh.config.base import PositiveInt, Section, http_parts


class TelemetrySection(Section):
    otlp: str | None = Field(
        None,
        description="Collector of traces, `http://host:4317` or `https://...`: OTLP over gRPC. None: no traces. Where "
        "it is set, a host's OTEL_EXPORTER_OTLP_ENDPOINT takes its place there. See docs/telemetry.md.",
    )
    sample: float = Field(
        1.0, ge=0.0, le=1.0, description="Share of the trajectories that are traced, the same ones in all services."
    )
    queue: PositiveInt = Field(
        8192, description="Spans of a service that wait for the collector; further ones are dropped and counted."
    )

    @field_validator("otlp")
    @classmethod
    def _is_collector(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = http_parts(value)
        if parts is None or parts.path.strip("/") or parts.query or parts.fragment:
            raise ValueError("needs http://HOST:PORT or https://HOST:PORT, the address of OTLP over gRPC (port 4317)")
        return value
