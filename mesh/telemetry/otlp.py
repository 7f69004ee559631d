"""OTLP over gRPC: spans to a collector, by the exporter of OpenTelemetry.

The exporter reads the standard variables OTEL_EXPORTER_OTLP_* of its host, except for the address and the key. This
module is imported only where there are traces, since OpenTelemetry takes time to load.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from importlib import metadata

from opentelemetry.exporter.otlp.proto.grpc import exporter as library
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SdkEvent
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

from rollmesh.mesh.telemetry.span import Attributes, Span, Value

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
# Seconds of one message, with the exporter's own repetitions.
_SEND_S = 5.0
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET = Status(StatusCode.UNSET)


class OtlpSender:
    """Sends spans to one collector.

    Args:
        endpoint: http(s)://host:port; the host's `ENDPOINT` takes its place.
        key: of the collector, a bearer token; None: it asks for none.
        resource: who sends, as attributes.
    """

    def __init__(self, endpoint: str, key: str | None, resource: Mapping[str, str]) -> None:
        self._resource = Resource(resource)
        self._scope = InstrumentationScope("rollmesh", metadata.version("rollmesh"))
        headers = None if key is None else {"authorization": f"Bearer {key}"}
        at = os.environ.get(ENDPOINT) or endpoint
        self._exporter = OTLPSpanExporter(endpoint=at, headers=headers, timeout=_SEND_S)

    def send(self, spans: Sequence[Span]) -> str:
        """See Sender."""
        why = _LastMessage()
        library.logger.addFilter(why)
        try:
            result = self._exporter.export([self._readable(span) for span in spans])
        finally:
            library.logger.removeFilter(why)
        return "" if result is SpanExportResult.SUCCESS else why.text or "no reason is given"

    def abort(self) -> None:
        """See Sender."""
        self._exporter.shutdown()

    def _readable(self, span: Span) -> ReadableSpan:
        return ReadableSpan(
            span.name,
            context=_context(span.trace_id, span.span_id),
            parent=None if span.parent_id is None else _context(span.trace_id, span.parent_id),
            resource=self._resource,
            attributes=_prefixed(span.attributes),
            events=[SdkEvent(event.name, _prefixed(event.attributes), event.at_ns) for event in span.events],
            links=() if span.link is None else (Link(_context(*span.link)),),
            status=Status(StatusCode.ERROR, span.failure) if span.failure else _UNSET,
            start_time=span.began_ns,
            end_time=span.ended_ns,
            instrumentation_scope=self._scope,
        )


class _LastMessage(logging.Filter):
    """Keeps the exporter's last message, which would fill the log during an outage."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.text = record.getMessage()
        return False


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=True, trace_flags=_SAMPLED)


def _prefixed(attributes: Attributes) -> dict[str, Value]:
    return {f"rollmesh.{name}": value for name, value in attributes.items()}
