"""The notice that no training step comes, and the known causes.

Long steps alone give no notice: the latest ones show how long they take. A single slow one, as after a recovery, does
not silence the notice.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Mapping, Sequence

from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.mesh.tables import TRAIN
from rollmesh.protos import buffer_pb2
from rollmesh.report.failures import failed_groups, failures_text

_LEAST_S = 20.0
# Steps whose median counts.
_RECENT = 5


class NoStepNotice:
    """Schedules the notice: after twice a recent step's time, and whenever the silence has lasted twice as long.

    Args:
        now: seconds of a clock that only rises.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._after = _LEAST_S
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def step(self, now: float) -> None:
        """Records that a step was trained."""
        self._recent.append(now - self._since)
        self._after = max(_LEAST_S, 2 * statistics.median_low(self._recent))
        self._since = now

    def due(self, now: float) -> float:
        """Seconds without a step where the notice is due; else 0."""
        lasted = now - self._since
        if lasted < self._after:
            return 0.0
        self._after = 2 * lasted
        return lasted


def no_step_text(
    seconds: float, snapshot: Snapshot, failed: Sequence[buffer_pb2.FailedGroup], before: Mapping[str, int]
) -> str:
    """The notice: how long there was no step, and the known causes.

    Args:
        failed: the latest groups that failed, the last of them first.
        before: ends of groups by reason when the launcher began; those failures explain no present wait.
    """
    parts = [f"no step for {seconds:.0f} s: {snapshot.who_waits()}"]
    if snapshot.table is not None:
        since = Counter(snapshot.table.counts.reasons) - Counter(before)
        causes = Counter(cause for group in failed[: failed_groups(since)] for cause in group.causes if cause)
        mostly = (cause for cause, _ in causes.most_common(1))
        parts.append(failures_text(TRAIN, since, mostly))
    return "; ".join(filter(None, parts))
