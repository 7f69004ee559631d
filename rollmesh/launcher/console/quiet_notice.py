"""When to say that no training step comes, and what is known of why.

A run whose steps take long is no news: the last one tells how long they take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rollmesh.launcher.mesh_monitor import Snapshot
from rollmesh.protos import buffer_pb2
from rollmesh.report.failures import failures_text

_LEAST_S = 20.0


class Quiet:
    """The time without a step: to be told after twice the last one's, and whenever it has lasted twice as long.

    Args:
        now: seconds of a clock that only rises.
    """

    def __init__(self, now: float) -> None:
        self._since = now
        self._after = _LEAST_S

    def step(self, now: float) -> None:
        """A step was trained."""
        self._after = max(_LEAST_S, 2 * (now - self._since))
        self._since = now

    def due(self, now: float) -> float:
        """Seconds without a step, where that is to be told now; else 0."""
        lasted = now - self._since
        if lasted < self._after:
            return 0.0
        self._after = 2 * lasted
        return lasted


def no_step(seconds: float, snapshot: Snapshot, failed: Iterable[buffer_pb2.FailedGroup]) -> str:
    """What is known of a time without a step.

    Args:
        failed: the latest groups that failed.
    """
    said = [f"no step for {seconds:.0f} s: {snapshot.who_waits()}"]
    if snapshot.table is not None:
        causes = Counter(cause for group in failed for cause in group.causes if cause)
        mostly = (cause for cause, _ in causes.most_common(1))
        said.append(failures_text("train", snapshot.table.counts.reasons, mostly))
    return "; ".join(filter(None, said))
