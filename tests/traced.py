"""A tracer that keeps its spans here."""

from __future__ import annotations

from collections import defaultdict
from typing import cast

from rollmesh.mesh.telemetry.span import Span
from rollmesh.mesh.telemetry.span_export import SpanCounts, SpanExport
from rollmesh.mesh.telemetry.trace_ids import trajectory_trace
from rollmesh.mesh.telemetry.tracing import Tracer

RUN = "run"


class KeptSpans:
    """Takes spans in the place of an export."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.tracer = Tracer(RUN, 1.0, cast(SpanExport, self), SpanCounts())

    def put(self, span: Span) -> None:
        self.spans.append(span)

    def of(self, group_id: str, member: int) -> dict[str, list[Span]]:
        """A trajectory's spans by name."""
        found = defaultdict(list)
        for span in self.spans:
            if span.trace_id == trajectory_trace(RUN, group_id, member):
                found[span.name].append(span)
        return dict(found)
