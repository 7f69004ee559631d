"""Traces of trajectories and of versions: each service reports its part, and a collector puts them together.

Invariants: a span is reported once, when it has ended, with the times that its service has measured. Without a
collector nothing is made: `trajectory` and `version` answer None. Nothing here is called per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType

from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.telemetry import TelemetrySection
from rollmesh.mesh.private_files import read_secret
from rollmesh.mesh.telemetry.span import Attributes, Event, Span
from rollmesh.mesh.telemetry.span_export import CLOSE_S, SpanCounts, SpanExport
from rollmesh.mesh.telemetry.trace_ids import ROOT, STEP, is_kept, span_of, trajectory_trace, version_trace
from rollmesh.mesh.trajectory.versions import PolicyVersion

_NONE: Attributes = MappingProxyType({})


class Trace:
    """One trace, for the spans that this service adds to it.

    Args:
        trace_id: see `trace_ids`.
        root: name of the span that the others lie in.
        put: takes the spans.
    """

    __slots__ = ("_put", "_root", "_trace_id")

    def __init__(self, trace_id: int, root: str, put: Callable[[Span], None]) -> None:
        self._trace_id = trace_id
        self._root = root
        self._put = put

    @property
    def root(self) -> tuple[int, int]:
        """The trace and its root, for links to it."""
        return self._trace_id, span_of(self._trace_id, self._root)

    def record(
        self,
        name: str,
        began_ns: int,
        ended_ns: int,
        attributes: Attributes = _NONE,
        *,
        number: int | str = 0,
        inside: tuple[str, int | str] | None = None,
        events: Sequence[Event] = (),
        link: tuple[int, int] | None = None,
        failure: str = "",
    ) -> None:
        """Reports a span that has ended.

        Args:
            name: of the span.
            began_ns, ended_ns: Unix time.
            attributes: without our prefix.
            number: sets spans of this name apart: the attempt, the use, or who reports.
            inside: name and number of the span that it lies in; None: the root.
            events: moments within it.
            link: the root of another trace, to which it is related.
            failure: why it failed; empty where it did not.
        """
        trace_id = self._trace_id
        span_id = span_of(trace_id, name, number)
        parent = None if name == self._root else span_of(trace_id, *(inside or (self._root,)))
        # Clocks of two hosts differ; a negative time would be worse than none.
        ended_ns = max(began_ns, ended_ns)
        self._put(Span(name, trace_id, span_id, parent, began_ns, ended_ns, attributes, events, link, failure))


class Tracer:
    """Makes the traces of one run, as one service reports them.

    Args:
        run: name of the run.
        share: of the trajectories that are traced.
        export: takes the spans; None: there are no traces.
        counts: of spans, for Prometheus.
    """

    def __init__(self, run: str, share: float, export: SpanExport | None, counts: SpanCounts) -> None:
        self._run = run
        self._share = share
        self._export = export
        self.counts = counts

    @property
    def is_on(self) -> bool:
        """True where there is a collector: callers leave out what only traces need."""
        return self._export is not None

    def trajectory(self, group_id: str, member: int) -> Trace | None:
        """The trace of a trajectory; None where it is not traced."""
        if self._export is None:
            return None
        trace_id = trajectory_trace(self._run, group_id, member)
        return Trace(trace_id, ROOT, self._export.put) if is_kept(trace_id, self._share) else None

    def version(self, policy: PolicyVersion) -> Trace | None:
        """The trace of a version; None without a collector."""
        if self._export is None:
            return None
        return Trace(version_trace(self._run, policy), STEP, self._export.put)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Sends what waits, for so many seconds at most."""
        if self._export is not None:
            self._export.close(timeout_s)


def no_traces() -> Tracer:
    """A tracer without a collector."""
    return Tracer("", 0.0, None, SpanCounts())


def open_tracer(
    section: TelemetrySection, security: SecuritySection, *, run: str, service: str, instance: str
) -> Tracer:
    """The tracer of a service; its `close` takes a bounded time.

    Args:
        section: of the run's configuration.
        security: of this host.
        run: name of the run.
        service: buffer, generator, learner or reward.
        instance: member id.

    Raises:
        ConfigError: the collector's key cannot be read.
    """
    if section.otlp is None:
        return no_traces()
    from rollmesh.mesh.telemetry.otlp import OtlpSender

    path = security.telemetry_key_file
    key = None if path is None else read_secret(path, "security.telemetry_key_file")
    resource = {
        "service.namespace": "rollmesh",
        "service.name": f"rollmesh-{service}",
        "service.instance.id": instance,
        "rollmesh.run": run,
    }
    counts = SpanCounts()
    return Tracer(
        run, section.sample, SpanExport(OtlpSender(section.otlp, key, resource), section.queue, counts), counts
    )
