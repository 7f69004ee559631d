"""What receivers reported: how long a version took to come into service, and what went wrong."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from mesh.versions import PolicyVersion
from protos import weights_pb2

# Reports kept per receiver.
_KEPT = 4096
# Full transfers whose speed tells what a receiver's network carries.
_RATES = 8


@dataclass(frozen=True, slots=True)
class PushSummary:
    """Percentiles over reports, in microseconds; 0 where there is none.

    Attributes:
        count: versions put into service.
        errors: versions that were refused or could not be received.
        bytes: received in all.
        total_us_p50, total_us_p99: announcement to service.
        pause_us_p50, pause_us_p99: decoding stood still.
        last_error: text of the newest error.
    """

    count: int
    errors: int
    bytes: int
    total_us_p50: float
    total_us_p99: float
    pause_us_p50: float
    pause_us_p99: float
    last_error: str


@dataclass(slots=True)
class _Receiver:
    total_us: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT))
    pause_us: deque[int] = field(default_factory=lambda: deque(maxlen=_KEPT))
    count: int = 0
    errors: int = 0
    bytes: int = 0
    last_error: str = ""
    full_bytes_per_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RATES))
    serving: PolicyVersion | None = None
    digest: str = ""


class PushStatistics:
    """Collects `SwapReport`s; may be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._receivers: dict[str, _Receiver] = {}
        self._last_error = ""

    def add(self, report: weights_pb2.SwapReport) -> None:
        """Takes one report in."""
        with self._lock:
            receiver = self._receivers.setdefault(report.member_id, _Receiver())
            receiver.bytes += report.bytes
            receiver.digest = report.digest
            if report.error:
                receiver.errors += 1
                receiver.last_error = self._last_error = report.error
                return
            receiver.count += 1
            if report.encoding != "delta" and report.transport == "grpc" and report.last_byte_us:
                receiver.full_bytes_per_s.append(report.bytes / report.last_byte_us * 1e6)
            receiver.total_us.append(report.total_us)
            receiver.pause_us.append(report.pause_us)
            receiver.serving = PolicyVersion.from_proto(report.policy)

    def bytes_per_s(self, member_id: str) -> float | None:
        """What a receiver's network carries: its fastest full transfer over grpc of late; None: there was none.

        Timed from the announcement, so that what it waited for before is in it: the fastest one waited least.
        """
        with self._lock:
            receiver = self._receivers.get(member_id)
            return max(receiver.full_bytes_per_s, default=None) if receiver else None

    def summary(self) -> PushSummary:
        """Over all receivers."""
        with self._lock:
            return _summarize(self._receivers.values(), self._last_error)

    def by_receiver(self) -> dict[str, PushSummary]:
        """Per member id."""
        with self._lock:
            return {name: _summarize([receiver], receiver.last_error) for name, receiver in self._receivers.items()}

    def served(self) -> dict[str, tuple[PolicyVersion, str]]:
        """Per member id: the version in service and its digest, as last reported."""
        with self._lock:
            return {name: (r.serving, r.digest) for name, r in self._receivers.items() if r.serving is not None}


def _summarize(receivers: Iterable[_Receiver], last_error: str) -> PushSummary:
    receivers = list(receivers)
    totals = [value for receiver in receivers for value in receiver.total_us]
    pauses = [value for receiver in receivers for value in receiver.pause_us]
    return PushSummary(
        count=sum(receiver.count for receiver in receivers),
        errors=sum(receiver.errors for receiver in receivers),
        bytes=sum(receiver.bytes for receiver in receivers),
        total_us_p50=_percentile(totals, 50),
        total_us_p99=_percentile(totals, 99),
        pause_us_p50=_percentile(pauses, 50),
        pause_us_p99=_percentile(pauses, 99),
        last_error=last_error,
    )


def _percentile(values: list[int], q: float) -> float:
    return float(np.percentile(values, q)) if values else 0.0
