"""The thread that computes records and hands them to the trackers: none of it is on the training path.

Invariants: records arrive in order; `log` never blocks and never raises. A tracker that fails here is reported once and
left out from then on; the others continue. Trackers of services have threads and rules of their own
(`learner.metrics.trackers.background`). Every record is written under its second names too.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from rollmesh.learner.metrics.catalogue import describe
from rollmesh.learner.metrics.trackers.background import CLOSE_S, BackgroundTracker
from rollmesh.learner.metrics.trackers.interface import Record, Sample, Tracker

log = logging.getLogger(__name__)


class MetricsWriter:
    """Fans records out to trackers from a thread of its own.

    Args:
        trackers: closed by `close`.
    """

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def log(self, step: int, record: Record) -> None:
        """Queues a record; it must not be changed afterwards."""
        self._jobs.put(functools.partial(self._fan_out, step, record))

    def submit(self, job: Callable[[], None]) -> None:
        """Queues other work after the records; the job handles its own errors."""
        self._jobs.put(job)

    def write_now(self, step: int, record: Record) -> None:
        """Hands a record to the trackers; for jobs of `submit`, in the writer's thread."""
        self._fan_out(step, record)

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Hands kept samples to the trackers; for jobs of `submit`, as `write_now`."""
        for tracker in tuple(self._trackers):
            self._guard(tracker, functools.partial(tracker.log_samples, step, samples))

    def lost_records(self) -> dict[str, int]:
        """Records that trackers of services have not taken, as a metric; empty without such trackers."""
        services = [tracker for tracker in self._trackers if isinstance(tracker, BackgroundTracker)]
        return {"trackers/lost_records": sum(tracker.lost for tracker in services)} if services else {}

    def close(self, timeout_s: float = 30.0) -> None:
        """Writes the queued records and closes the trackers.

        Args:
            timeout_s: for the records; each tracker has seconds of its own.
        """
        timeout_s += CLOSE_S * len(self._trackers)
        self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("metrics not flushed within %.0f s", timeout_s)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        for tracker in self._trackers:
            self._guard(tracker, tracker.close)

    def _fan_out(self, step: int, record: Record) -> None:
        record = with_aliases(record)
        for tracker in tuple(self._trackers):
            self._guard(tracker, functools.partial(tracker.log, step, record))

    def _guard(self, tracker: Tracker, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001  # third-party trackers raise anything; training must continue
            log.warning("%s failed and is not used any more: %s", type(tracker).__name__, error)
            if tracker in self._trackers:
                self._trackers.remove(tracker)


def with_aliases(record: Record) -> dict[str, Any]:
    """The record followed by its metrics under the names that peers' dashboards look for.

    A name that the record has itself is never overwritten.
    """
    second = {alias: value for name, value in record.items() for alias in _aliases(name)}
    return {**record, **{alias: value for alias, value in second.items() if alias not in record}}


@functools.lru_cache(maxsize=4096)
def _aliases(name: str) -> tuple[str, ...]:
    metric = describe(name)
    return () if metric is None else tuple(metric.aliases_of(name))
