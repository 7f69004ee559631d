"""The shares of the last minute in which learner and generators have waited, and the remedy where these are large."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rollmesh.launcher.mesh_client import Snapshot

_WINDOW_S = 60.0
# A share of the time from which it is worth a change, over most of the window.
_MUCH = 0.5
_LEAST_S = 30.0


@dataclass(frozen=True, slots=True)
class WaitShares:
    """Shares of a time, from 0 to 1.

    Attributes:
        learner: it waited for groups.
        generators: one of them, on average, waited for permission to begin a group.
        seconds: of the time.
    """

    learner: float
    generators: float
    seconds: float

    def __str__(self) -> str:
        return f"waited: learner {self.learner:.0%}, generators {self.generators:.0%} of the time"

    @property
    def advice(self) -> str:
        """The remedy; empty where neither side waits much, or it was not watched for long enough."""
        if self.seconds < _LEAST_S:
            return ""
        if self.learner >= _MUCH:
            return (
                "the learner waits for responses most of the time: more generators (rollout.replicas, or more devices "
                "for them) or shorter responses make the run faster"
            )
        if self.generators >= _MUCH:
            return (
                "generators wait for the learner most of the time: the learner is what more devices or ranks make "
                "faster (learner.ranks), and fewer generators would do"
            )
        return ""


class Bottleneck:
    """Follows the buffer's clocks of waiting, over a minute."""

    def __init__(self) -> None:
        # (Time, milliseconds of the learner, of all generators).
        self._seen: deque[tuple[float, int, int]] = deque()

    def observe(self, now: float, snapshot: Snapshot) -> WaitShares | None:
        """Takes a snapshot; gives the shares of the last minute.

        Args:
            now: seconds of a clock that only rises.
            snapshot: of then.

        Returns:
            None before there are two snapshots, or where the buffer does not answer.
        """
        table = snapshot.table
        if table is None:
            return None
        if self._seen and table.waiting_for_inserts_ms < self._seen[-1][1]:
            self._seen.clear()  # the buffer has begun its clocks again
        self._seen.append((now, table.waiting_for_inserts_ms, table.waiting_for_samples_ms))
        while now - self._seen[0][0] > _WINDOW_S and len(self._seen) > 2:
            self._seen.popleft()
        since, inserts, samples = self._seen[0]
        if now <= since:
            return None
        generators = max(1, len(snapshot.generators()))
        learner = (table.waiting_for_inserts_ms - inserts) / 1000 / (now - since)
        waited = (table.waiting_for_samples_ms - samples) / 1000 / (now - since) / generators
        return WaitShares(min(1.0, learner), min(1.0, max(0.0, waited)), now - since)
