"""A collector of traces: OTLP over real gRPC, spans kept in memory."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class Collected:
    """A span as it arrived; ids in hex, the parent's empty for a root. Attributes without their prefix."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    events: tuple[tuple[str, int], ...]
    links: tuple[str, ...]
    failure: str


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes what it is sent.

    Attributes:
        key: that it asks for; empty: none.
        spans: all so far.
        held: while it is clear, no call is answered.
        calls: is released by each.
    """

    def __init__(self, key: str = "") -> None:
        self.key = key
        self.spans: list[Collected] = []
        self.held = threading.Event()
        self.held.set()
        self.calls = threading.Semaphore(0)

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.calls.release()
        metadata = dict(context.invocation_metadata())
        if self.key and metadata.get("authorization") != f"Bearer {self.key}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")
        self.held.wait(60)
        for group in request.resource_spans:
            resource = _values(group.resource.attributes)
            for scope in group.scope_spans:
                self.spans += [_collected(resource["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def by_trace(self) -> dict[str, list[Collected]]:
        """The spans of each trace, in the order in which they began."""
        found = defaultdict(list)
        for span in sorted(self.spans, key=lambda span: span.began_ns):
            found[span.trace_id].append(span)
        return dict(found)


@contextmanager
def collecting(key: str = "", port: int = 0) -> Iterator[tuple[Collector, str]]:
    """A collector that listens, and its URL."""
    collector = Collector(key)
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{bound}"
    finally:
        collector.held.set()
        server.stop(None).wait(10)


def _collected(service: str, span: Any) -> Collected:
    return Collected(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        {name.removeprefix("rollmesh."): value for name, value in _values(span.attributes).items()},
        tuple((event.name, event.time_unix_nano) for event in span.events),
        tuple(link.trace_id.hex() for link in span.links),
        span.status.message,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in attributes}
