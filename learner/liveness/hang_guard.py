"""Ends a learner when its main thread hangs: its event loop still answers, so no other process can see that.

Invariants:
- a step hangs when it lasts `FACTOR` times as long as the longest so far, and at least `AT_LEAST_S`. That is more than
  any deadline within a step; the first one after a start may compile, and has a bound of its own;
- a move of the learner's memory, between its devices and a disk perhaps, hangs after `move_s`;
- an error that ends the run (`ControlRequests.fail`) is raised between two steps. Where the learner has not begun to
  end after `AT_LEAST_S`, its process ends with that error, whatever the thread does: it may be in code of the user;
- otherwise waits for groups, publications and checkpoints are not judged: they have deadlines, or wait for a disk;
- an observation that comes late counts for `MAX_OBSERVATION_S` at most: a learner that was itself stopped
  does not hang.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import NoReturn

from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.liveness.stall_detector import MAX_OBSERVATION_S
from rollmesh.learner.status import LearnerStatus
from rollmesh.mesh.config.learner import LearnerSection
from rollmesh.mesh.errors import RollmeshError, StuckError

log = logging.getLogger(__name__)
AT_LEAST_S = 600.0
FACTOR = 20.0
_OBSERVATION_S = 1.0
# For ranks to find out which one does not take part.
_NAMING_S = 60.0


def hang_after_s(learner: LearnerSection) -> float:
    """Seconds before which nothing hangs: ranks that wait for one of them, or for a role elsewhere, name it first."""
    if learner.ranks == 1 and not any(map(learner.is_apart, learner.roles)):
        return AT_LEAST_S
    return max(AT_LEAST_S, learner.distributed.timeout_s + _NAMING_S)


class HangWatch:
    """Judges the main thread from observations in the order of time.

    Args:
        first_s: bound of the first step, where it is more than `at_least_s`.
        at_least_s: nothing hangs before.
        move_s: bound of a move of memory, where it is more than `at_least_s`.

    Attributes:
        longest_s: of all steps that have ended.
    """

    def __init__(self, first_s: float, at_least_s: float = AT_LEAST_S, *, move_s: float = 0.0) -> None:
        self._first_s = first_s
        self._at_least_s = at_least_s
        self._move_s = move_s
        self._present = (False, "", 0)
        self._first: int | None = None
        self._last_s = self._lasted_s = self._error_pending_s = 0.0
        self.longest_s = 0.0

    def observe(
        self, now_s: float, *, training: bool, steps: int, move: str = "", error_pending: bool = False
    ) -> float | None:
        """Seconds for which the present step, move, or wait for an error to be raised has lasted, if the thread hangs.

        Args:
            now_s: of a monotonic clock.
            training: a batch is worked on.
            steps: that are done.
            move: of memory; empty: none.
            error_pending: an error ends the run, and the learner has not begun to end.
        """
        elapsed_s, self._last_s = min(max(0.0, now_s - self._last_s), MAX_OBSERVATION_S), now_s
        self._first = steps if self._first is None else self._first
        if self._present != (training, move, steps):
            if self._present[0]:
                self.longest_s = max(self.longest_s, self._lasted_s)
            self._present, self._lasted_s = (training, move, steps), 0.0
        elif training or move:
            self._lasted_s += elapsed_s
        if error_pending:
            self._error_pending_s += elapsed_s
            if self._error_pending_s > self._at_least_s:
                return self._error_pending_s
        if move:
            return self._lasted_s if self._lasted_s > max(self._at_least_s, self._move_s) else None
        bound_s = max(self._at_least_s, FACTOR * self.longest_s, self._first_s if steps == self._first else 0.0)
        return self._lasted_s if self._lasted_s > bound_s else None


async def end_process_on_hang(
    status: LearnerStatus,
    controls: ControlRequests,
    *,
    judges_steps: bool,
    first_s: float,
    move_s: float,
    at_least_s: float = AT_LEAST_S,
) -> None:
    """Watches the main thread until cancelled; ends the process without asking that thread.

    Args:
        status: written by that thread.
        controls: have the error that ends the run.
        judges_steps: otherwise errors alone count.
        first_s, move_s, at_least_s: see `HangWatch`.
    """
    watch, clock = HangWatch(first_s, at_least_s, move_s=move_s), asyncio.get_running_loop().time
    while True:
        lasted_s = watch.observe(
            clock(),
            training=judges_steps and status.phase == "training",
            steps=status.steps,
            move=status.placement.move if judges_steps and status.placement is not None else "",
            error_pending=controls.error is not None and status.phase != "ending",
        )
        if lasted_s is not None:
            break
        await asyncio.sleep(min(_OBSERVATION_S, at_least_s / 4))
    if controls.error is not None:
        log.warning("the main thread (%s) has not begun for %.0f s to end the run", status.phase, lasted_s)
        _end(controls.error)
    if status.placement is not None and status.placement.move:
        _end(
            StuckError(
                f"{status.placement.move} of the learner's memory has lasted for {lasted_s:.0f} s",
                hint="does the disk under placement.rest_dir answer? A longer placement.step_timeout_s allows more",
            )
        )
    _end(
        StuckError(
            f"the step after {status.steps} has lasted for {lasted_s:.0f} s, "
            f"the longest before {watch.longest_s:.0f} s",
            hint="the training thread hangs; resources.frozen_after_s: 0 lets it, and buffer.stall_limit_s bounds "
            "a first step",
        )
    )


def _end(error: RollmeshError) -> NoReturn:
    log.error("%s", error, extra={"code": error.code})
    os._exit(error.exit_code)
