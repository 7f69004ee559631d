"""Detection of stalled runs: a pure decision, fed with observations of the mesh.

Invariants:
- the clock runs only while the learner waits for groups. It begins again with every progress: a member or a longer
  draft stored, a batch claimed, a fate. Changes that can be undone and repeated for ever (leases, releases,
  re-admissions, refused claims) never stop it (`note_progress` in `buffer/lua/lib/common.lua`);
- tokens sampled for groups are progress as well, so that long answers are no stall. They count above the most seen
  since the last other progress, because generators come and go. After a group has changed hands they may be the same
  tokens, sampled again, and do not count. They count for `MAX_SAMPLING_S` at most: gauges may grow without a result;
- the clock of the limit also stops while no generator serves and one still loads or compiles a model. It stops for
  `MAX_LOADING_S` since the last progress at most, because not every engine has a deadline;
- an observation that comes late counts for `MAX_OBSERVATION_S` at most: a learner that was itself stopped
  blames no one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_OBSERVATION_S = 10.0
MAX_LOADING_S = 1800.0
MAX_SAMPLING_S = 3600.0


@dataclass(frozen=True, slots=True)
class MeshObservation:
    """The mesh at one moment.

    Attributes:
        now_s: of a monotonic clock.
        moved: names the last progress; another value is a new one.
        tokens: sampled for groups by the generators that are alive.
        handovers: groups that were taken from one holder to another, so far.
        waits: the learner waits for groups.
        loading: no generator serves, and one is still on its way to an engine.
    """

    now_s: float
    moved: int
    tokens: int
    handovers: int
    waits: bool
    loading: bool


@dataclass(frozen=True, slots=True)
class Stalled:
    """Nothing has moved for these seconds: reported when it begins to matter, then whenever they have doubled."""

    seconds: float
    begins: bool


@dataclass(frozen=True, slots=True)
class StallEnded:
    """Groups move again after these seconds; `by_tokens`: sampling moved first."""

    seconds: float
    by_tokens: bool


@dataclass(frozen=True, slots=True)
class LimitExceeded:
    """The limit is reached after these seconds: the run cannot continue."""

    seconds: float


class StallDetector:
    """Decides on observations in the order of time.

    Args:
        stall_s: seconds without progress from which on a run is stalled.
        limit_s: seconds after which it cannot continue; 0: never.
    """

    def __init__(self, *, stall_s: float, limit_s: float) -> None:
        self._stall_s = stall_s
        self._limit_s = limit_s or math.inf
        self._last: MeshObservation | None = None
        self._handovers = self._most_tokens = 0
        self._sampling_s = 0.0
        self._quiet_s = 0.0
        self._counted_s = 0.0
        self._loading_s = 0.0
        self._next_report_s = stall_s
        self._ended_s = 0.0
        self.stalls = 0

    @property
    def stalled_s(self) -> float:
        """Seconds of the present stall; 0 without one."""
        return self._quiet_s if self._next_report_s > self._stall_s else 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all stalls."""
        return self._ended_s + self.stalled_s

    def observe(self, observation: MeshObservation) -> Stalled | StallEnded | LimitExceeded | None:
        """The event of this observation, if any; `LimitExceeded` comes once."""
        last, self._last = self._last, observation
        if last is None or observation.moved != last.moved:
            self._handovers, self._most_tokens, self._sampling_s = observation.handovers, observation.tokens, 0.0
            return self._progressed(by_tokens=False)
        elapsed = min(max(0.0, observation.now_s - last.now_s), MAX_OBSERVATION_S) if observation.waits else 0.0
        self._sampling_s += elapsed
        sampled = observation.tokens > self._most_tokens and observation.handovers == self._handovers
        if sampled and self._sampling_s <= MAX_SAMPLING_S:
            self._most_tokens = observation.tokens
            return self._progressed(by_tokens=True)
        if not observation.waits:
            return None
        self._quiet_s += elapsed
        if observation.loading and self._loading_s < MAX_LOADING_S:
            self._loading_s += elapsed
        else:
            self._counted_s += elapsed
        if self._quiet_s >= self._next_report_s:
            begins = self._next_report_s == self._stall_s
            self.stalls += begins
            self._next_report_s = 2 * self._quiet_s
            return Stalled(self._quiet_s, begins)
        if self._counted_s >= self._limit_s:
            self._limit_s = math.inf
            return LimitExceeded(self._quiet_s)
        return None

    def _progressed(self, *, by_tokens: bool) -> StallEnded | None:
        stalled_s, self._ended_s = self.stalled_s, self.total_s
        self._quiet_s = self._counted_s = self._loading_s = 0.0
        self._next_report_s = self._stall_s
        return StallEnded(stalled_s, by_tokens) if stalled_s else None
