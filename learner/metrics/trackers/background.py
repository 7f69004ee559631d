"""A tracker with a thread of its own, so that a server that is slow or gone delays nothing else.

Invariants: `log` and `log_samples` never block and never raise. At most `LIMIT` records wait; further ones are lost,
and counted. A tracker that cannot be opened is tried again until the end of the run. A record that fails is lost: the
packages try again by themselves. A series of failures is reported once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress

from rollmesh.learner.metrics.trackers.interface import Record, Sample, Tracker
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.runtime.job_queue import JobQueue

log = logging.getLogger(__name__)
LIMIT = 1000
"""Records that wait at most: those of an outage of minutes to hours."""
OPEN_S = 20.0
"""Seconds for which a start waits for its trackers; later they are opened while the run trains."""
RETRY_S = 60.0
CLOSE_S = 20.0
Job = Callable[[Tracker], None]


class BackgroundTracker(Tracker):
    """Hands records to a tracker in another thread.

    Args:
        name: of the service, for messages.
        open_tracker: called in the thread.
        limit: records that wait at most.
        retry_s: from one attempt to open it to the next.

    Attributes:
        lost: records that it has not taken.
    """

    def __init__(
        self, name: str, open_tracker: Callable[[], Tracker], *, limit: int = LIMIT, retry_s: float = RETRY_S
    ) -> None:
        self._name = name
        self._open_tracker = open_tracker
        self._limit = limit
        self._retry_s = retry_s
        self._jobs: JobQueue[Job] = JobQueue(limit)
        self._is_failing = False
        self._first_attempt: Future[None] = Future()
        self.lost = 0
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def wait_open(self, timeout_s: float) -> None:
        """Waits until the tracker is open, or could not be opened for now.

        Args:
            timeout_s: after which the run begins without it; its records wait.

        Raises:
            ConfigError: its settings or its credentials are wrong.
        """
        with suppress(TimeoutError):
            self._first_attempt.result(timeout_s)
            return
        if self._first_attempt.cancel():
            log.warning("%s is not open yet; the run begins, and its records wait", self._name)
        else:
            self._first_attempt.result()

    def log(self, step: int, record: Record) -> None:
        self._put(lambda tracker: tracker.log(step, record))

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._put(lambda tracker: tracker.log_samples(step, samples))

    def close(self) -> None:
        """Gives the tracker `CLOSE_S` for the records that wait."""
        self._jobs.close()
        self._thread.join(CLOSE_S)
        if lost := self.lost + len(self._jobs):
            log.warning("%s lacks %d records; metrics.jsonl and samples.jsonl have them all", self._name, lost)

    def _put(self, job: Job) -> None:
        if not self._jobs.put(job):
            self._lose(f"{self._limit} records wait for it")

    def _run(self) -> None:
        tracker = self._open()
        if tracker is None:
            return
        while (job := self._jobs.get()) is not None:
            self._attempt(job, tracker)
        self._attempt(lambda opened: opened.close(), tracker)

    def _open(self) -> Tracker | None:
        """The open tracker; None where the run ends first, or its settings are wrong."""
        while True:
            try:
                tracker = self._open_tracker()
            except ConfigError as error:
                if not self._answer_start(error):
                    log.warning("%s is not used: %s", self._name, error)
                return None
            except Exception as error:  # noqa: BLE001  # third-party trackers raise anything; training must continue
                trouble = f"it cannot be opened, and is tried again every {self._retry_s:.0f} s"
                self._report(f"{trouble}: {type(error).__name__} {error}")
                self._answer_start()
            else:
                self._is_failing = False
                self._answer_start()
                return tracker
            if self._jobs.wait_closed(self._retry_s):
                return None

    def _answer_start(self, error: ConfigError | None = None) -> bool:
        """Gives the outcome of the first attempt to the start; False where that does not wait for it any more."""
        if self._first_attempt.done() or not self._first_attempt.set_running_or_notify_cancel():
            return False
        if error is None:
            self._first_attempt.set_result(None)
        else:
            self._first_attempt.set_exception(error)
        return True

    def _attempt(self, job: Job, tracker: Tracker) -> None:
        try:
            job(tracker)
        except Exception as error:  # noqa: BLE001  # as above
            self._lose(f"{type(error).__name__}: {error}")
        else:
            self._is_failing = False

    def _lose(self, reason: str) -> None:
        self.lost += 1
        self._report(f"records are lost: {reason}")

    def _report(self, trouble: str) -> None:
        """Warns at the beginning of a series of failures."""
        if not self._is_failing:
            log.warning("%s: %s; the training continues", self._name, trouble)
        self._is_failing = True
