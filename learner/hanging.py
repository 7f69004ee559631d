"""Ends a learner whose training thread hangs: its event loop answers for it, so no one else can see that.

Invariants:
- only the work on a batch is judged, and only once this learner has finished a step: a first one may compile. Waits for
  groups, publications and checkpoints have deadlines of their own, or wait for a disk;
- a step hangs when it lasts `FACTOR` times as long as the longest so far, and `AT_LEAST_S` at the least, which is more
  than any deadline within a step;
- a look that comes late counts for `MAX_LOOK_S` at most: a learner that was stopped itself does not hang.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable

from learner.state import LearnerState
from learner.watchdog import MAX_LOOK_S
from mesh.errors import StuckError

_log = logging.getLogger(__name__)
AT_LEAST_S = 600.0
FACTOR = 20.0
_LOOK_S = 1.0


class StepWatch:
    """Judges the present step; sees looks in the order of time.

    Args:
        at_least_s: no step hangs before.
    """

    def __init__(self, at_least_s: float = AT_LEAST_S) -> None:
        self._at_least_s = at_least_s
        self._present = (False, 0)
        self._first: int | None = None
        self._last_s = self._lasted_s = 0.0
        self.longest_s = 0.0

    def look(self, now_s: float, *, training: bool, steps: int) -> float | None:
        """Seconds that the present step has lasted where it hangs.

        Args:
            now_s: of a monotonic clock.
            training: a batch is worked on.
            steps: that are done.
        """
        elapsed_s, self._last_s = min(max(0.0, now_s - self._last_s), MAX_LOOK_S), now_s
        self._first = steps if self._first is None else self._first
        if self._present != (training, steps):
            self.longest_s = max(self.longest_s, self._lasted_s)
            self._present, self._lasted_s = (training, steps), 0.0
        elif training:
            self._lasted_s += elapsed_s
        hangs = steps > self._first and self._lasted_s > max(self._at_least_s, FACTOR * self.longest_s)
        return self._lasted_s if hangs else None


async def end_where_it_hangs(
    state: LearnerState, *, at_least_s: float = AT_LEAST_S, leave: Callable[[int], object] = os._exit
) -> None:
    """Watches the training thread until cancelled.

    Args:
        state: as that thread tells it.
        at_least_s: see `StepWatch`.
        leave: ends the process without asking that thread.
    """
    watch, clock = StepWatch(at_least_s), asyncio.get_running_loop().time
    while True:
        lasted_s = watch.look(clock(), training=state.phase == "training", steps=state.steps)
        if lasted_s is not None:
            break
        await asyncio.sleep(min(_LOOK_S, at_least_s / 4))
    error = StuckError(
        f"the step after {state.steps} has lasted for {lasted_s:.0f} s, the longest before {watch.longest_s:.0f} s",
        hint="the training thread hangs; resources.frozen_after_s: 0 lets it",
    )
    _log.error("%s", error, extra={"code": error.code})
    leave(error.exit_code)
