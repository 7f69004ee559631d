"""Logs failures of Redis as one outage.

Invariant: a cause is logged when it begins and every `AGAIN_S` while it lasts, and its end once; never once per try,
job or stream.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rollmesh.mesh.errors import RollmeshError

log = logging.getLogger(__name__)
AGAIN_S = 10.0


class RedisOutage:
    """Failures of one front's background work.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failing: set[str] = set()
        self._since = 0.0
        self._reported: dict[str, float] = {}

    def job_failed(self, job: str, error: RollmeshError) -> None:
        """Records a failure of a job, which is repeated until it has passed."""
        if not self._failing:
            self._since = self._clock()
        self._failing.add(job)
        self.report(job, error)

    def report(self, job: str, error: RollmeshError) -> None:
        """Logs a failure of something that is not repeated."""
        now = self._clock()
        # The words after it differ from one try to the next.
        cause = error.message.partition(":")[0]
        if cause in self._reported and now < self._reported[cause] + AGAIN_S:
            return
        self._reported[cause] = now
        lasting = f", for {now - self._since:.0f} s now" if self._failing and now > self._since else ""
        log.warning("%s: %s%s", job, error, lasting)

    def job_passed(self, job: str) -> None:
        """Records that a job has succeeded."""
        if job in self._failing:
            self._failing.discard(job)
            if not self._failing:
                self._reported.clear()
                log.info("Redis works again, after %.0f s", self._clock() - self._since)
