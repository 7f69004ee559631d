"""Reports of receivers: the way of each version into service, and its failures.

A push in time: announced, first byte, last (verified) byte, swap, acknowledged. The receiver times all but the last
from the announcement. The learner's clock alone times the acknowledgement, and only for versions that were announced
while the receiver was watching. The learner did not wait for one that came later.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import InitVar, dataclass, field
from typing import Any

from rollmesh.learner.weights.recent_times import RecentTimes
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import weights_pb2

# Receivers remembered, as many as a run may have members; every start of a generator is a new one.
_RECEIVERS = 6144
# Reports kept per receiver, and of all receivers together; announcements that may still be acknowledged.
_KEPT, _KEPT_OF_ALL = 128, 4096
_ANNOUNCEMENTS = 256
# Full transfers that show the speed of a receiver's network.
_RATES = 8
# In the order in which they happen; the pause is a duration, the others are moments.
STAGES = ("first_byte", "last_byte", "pause", "total", "ack")
# Those that the receiver itself reports.
_REPORTED = STAGES[:-1]


@dataclass(frozen=True, slots=True)
class PushSummary:
    """Percentiles over reports, in microseconds; 0 without any.

    Attributes:
        count: versions put into service.
        errors: versions that were refused or could not be received.
        bytes: received in all.
        p50, p99: by stage (`STAGES`). From the announcement: to the first byte, to the last verified byte, to service
            (`total`) and to the report's arrival (`ack`). Also the pause in decoding.
        last_error: text of the newest error.
    """

    count: int
    errors: int
    bytes: int
    p50: dict[str, float]
    p99: dict[str, float]
    last_error: str

    def metrics(self, prefix: str = "") -> dict[str, float]:
        """Percentiles in milliseconds by name: `total_ms_p50` and so on."""
        return {
            f"{prefix}{stage}_ms_{name}": values[stage] / 1e3
            for stage in STAGES
            for name, values in (("p50", self.p50), ("p99", self.p99))
        }


@dataclass(slots=True)
class _Receiver:
    """The reports of one receiver, or of all together."""

    kept: InitVar[int] = _KEPT
    reported: RecentTimes = field(init=False)
    acknowledged: RecentTimes = field(init=False)
    full_bytes_per_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RATES))
    count: int = 0
    errors: int = 0
    bytes: int = 0
    watching_since_ns: int = 0
    streams: int = 0
    reported_ns: int = 0
    last: weights_pb2.SwapReport | None = None
    last_ack_us: int = 0
    failed: weights_pb2.SwapReport | None = None
    failed_ns: int = 0

    def __post_init__(self, kept: int) -> None:
        self.reported, self.acknowledged = RecentTimes(len(_REPORTED), kept), RecentTimes(1, kept)

    def add_failure(self, report: weights_pb2.SwapReport, now_ns: int) -> None:
        self.errors += 1
        self.failed, self.failed_ns = report, now_ns

    @property
    def last_policy(self) -> PolicyVersion | None:
        """The version that it has put into service last."""
        return PolicyVersion.from_proto(self.last.policy) if self.last is not None else None

    def add_success(self, report: weights_pb2.SwapReport, ack_us: int) -> None:
        self.count += 1
        if report.encoding != "delta" and report.transport == "grpc" and report.last_byte_us:
            self.full_bytes_per_s.append(report.bytes / report.last_byte_us * 1e6)
        self.last, self.last_ack_us = report, ack_us
        self.reported.add([getattr(report, f"{stage}_us") for stage in _REPORTED])
        if ack_us:
            self.acknowledged.add([ack_us])

    def percentiles(self) -> dict[str, tuple[float, float]]:
        """p50 and p99 by stage, in microseconds."""
        return dict(zip(STAGES, (*self.reported.percentiles(), *self.acknowledged.percentiles()), strict=True))

    def summary(self) -> PushSummary:
        """The sum of its reports."""
        found = self.percentiles()
        return PushSummary(
            count=self.count,
            errors=self.errors,
            bytes=self.bytes,
            p50={stage: p50 for stage, (p50, _) in found.items()},
            p99={stage: p99 for stage, (_, p99) in found.items()},
            last_error=self.failed.error if self.failed is not None else "",
        )


class PushStatistics:
    """Collects `SwapReport`s; may be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._receivers: dict[str, _Receiver] = {}
        # Kept up as reports come: the sum over all receivers costs the same with one and with thousands.
        self._all = _Receiver(_KEPT_OF_ALL)
        self._announced: dict[PolicyVersion, int] = {}

    def record_announcement(self, policy: PolicyVersion, unix_ns: int) -> None:
        """Records the time at which a version was announced."""
        with self._lock:
            self._announced[policy] = unix_ns
            while len(self._announced) > _ANNOUNCEMENTS:
                del self._announced[next(iter(self._announced))]

    def record_watch(self, member_id: str) -> None:
        """Records that a receiver watches from now on, until as many ends are recorded."""
        if member_id:
            with self._lock:
                receiver = self._receiver(member_id)
                receiver.watching_since_ns = time.time_ns()
                receiver.streams += 1

    def record_watch_end(self, member_id: str) -> None:
        """Records the end of a receiver's stream."""
        with self._lock:
            if receiver := self._receivers.get(member_id):
                receiver.streams -= 1

    def pending(self) -> int:
        """The number of receivers that watch, and have not put the newest version into service."""
        with self._lock:
            newest = next(reversed(self._announced), None)
            return sum(receiver.streams > 0 and receiver.last_policy != newest for receiver in self._receivers.values())

    def add(self, report: weights_pb2.SwapReport) -> None:
        """Adds a report."""
        now = time.time_ns()
        policy = PolicyVersion.from_proto(report.policy)
        with self._lock:
            receiver = self._receiver(report.member_id)
            announced = self._announced.get(policy, 0)
            waited_for = announced and receiver.watching_since_ns <= announced
            ack_us = max(1, (now - announced) // 1000) if waited_for else 0
            for each in (receiver, self._all):
                each.bytes += report.bytes
                each.reported_ns = now
                if report.error:
                    each.add_failure(report, now)
                else:
                    each.add_success(report, ack_us)

    def _receiver(self, member_id: str) -> _Receiver:
        """The statistics of one receiver; where there are too many, the one silent for longest is forgotten."""
        receiver = self._receivers.pop(member_id, None) or _Receiver()
        self._receivers[member_id] = receiver
        if len(self._receivers) > _RECEIVERS:
            del self._receivers[next(iter(self._receivers))]
        return receiver

    def bytes_per_s(self, member_id: str) -> float | None:
        """The speed of a receiver's network: its fastest recent full transfer over grpc; None: there was none.

        Timed from the announcement, so that earlier waits are included: the fastest transfer waited least.
        """
        with self._lock:
            receiver = self._receivers.get(member_id)
            return max(receiver.full_bytes_per_s, default=None) if receiver else None

    def summary(self) -> PushSummary:
        """Percentiles over the latest reports of all receivers; counts are those of all reports."""
        with self._lock:
            return self._all.summary()

    def by_receiver(self) -> dict[str, PushSummary]:
        """Percentiles by member id."""
        return {name: receiver.summary() for name, receiver in self._known()}

    def receivers(self) -> dict[str, dict[str, Any]]:
        """Receivers by member id, as JSON: counts, percentiles in milliseconds, the last push and the last failure."""
        return {
            name: {**_last_push(receiver), **receiver.summary().metrics(), "errors": receiver.errors}
            for name, receiver in self._known()
            if receiver.reported_ns
        }

    def to_proto(self) -> weights_pb2.PushesResponse:
        """All statistics; receivers with the latest reports come first."""
        receivers = sorted(self._known(), key=lambda item: -item[1].reported_ns)
        return weights_pb2.PushesResponse(receivers=[_entry(name, receiver) for name, receiver in receivers])

    def _known(self) -> list[tuple[str, _Receiver]]:
        """Receivers by member id. A report that comes while one is read may be in some of its values only."""
        with self._lock:
            return list(self._receivers.items())


def _last_push(receiver: _Receiver) -> dict[str, Any]:
    last, failed = receiver.last, receiver.failed
    found: dict[str, Any] = {"count": receiver.count, "bytes": receiver.bytes}
    if last is not None:
        times = {stage: getattr(last, f"{stage}_us") for stage in _REPORTED}
        found["last"] = {
            "version": str(PolicyVersion.from_proto(last.policy)),
            "transport": last.transport,
            "encoding": last.encoding,
            "source": last.source,
            "choice": last.choice,
            "bytes": last.bytes,
            **{f"{stage}_ms": value / 1e3 for stage, value in {**times, "ack": receiver.last_ack_us}.items()},
        }
    if failed is not None:
        found["last_error"] = {"version": str(PolicyVersion.from_proto(failed.policy)), "error": failed.error}
    return found


def _entry(member_id: str, receiver: _Receiver) -> weights_pb2.ReceiverPushes:
    failed = receiver.failed
    entry = weights_pb2.ReceiverPushes(
        member_id=member_id,
        last=receiver.last,
        last_ack_us=receiver.last_ack_us,
        reported_unix_ms=receiver.reported_ns // 10**6,
        count=receiver.count,
        errors=receiver.errors,
        bytes=receiver.bytes,
        last_error=failed.error if failed else "",
        last_error_policy=failed.policy if failed else None,
        last_error_unix_ms=receiver.failed_ns // 10**6,
    )
    for stage, (p50, p99) in receiver.percentiles().items():
        target = getattr(entry, f"{stage}_us")
        target.p50, target.p99 = p50, p99
    return entry
