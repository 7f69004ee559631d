"""A tracker with a thread: it delays nothing, however it fails, and what it loses is counted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from rollmesh.learner.metrics import Record
from rollmesh.learner.metrics.trackers.background import BackgroundTracker
from rollmesh.learner.metrics.trackers.interface import Tracker
from rollmesh.mesh.errors import ConfigError

_DEADLINE_S = 240.0


class Service(Tracker):
    """Takes a record when it may, unless that is to fail."""

    def __init__(self, *, fails_at: tuple[int, ...] = ()) -> None:
        self.may = threading.Event()
        self.began = threading.Event()
        self.taken: list[int] = []
        self.closed = threading.Event()
        self._fails_at = fails_at

    def log(self, step: int, record: Record) -> None:
        self.began.set()
        assert self.may.wait(_DEADLINE_S)
        if step in self._fails_at:
            raise ConnectionError("no answer")
        self.taken.append(step)

    def close(self) -> None:
        self.closed.set()


def test_a_service_that_hangs_loses_what_does_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    service = Service()
    tracker = BackgroundTracker("S", lambda: service, limit=2)
    tracker.wait_open(_DEADLINE_S)
    tracker.log(1, {})
    assert service.began.wait(_DEADLINE_S)
    for step in range(2, 7):
        tracker.log(step, {})
    assert tracker.lost == 3
    service.may.set()
    tracker.close()
    assert service.taken == [1, 2, 3]
    assert service.closed.is_set()
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == [
        "S: records are lost: 2 records wait for it; the training continues",
        "S lacks 3 records; metrics.jsonl and samples.jsonl have them all",
    ]


def test_a_series_of_failures_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    service = Service(fails_at=(2, 3, 5))
    service.may.set()
    tracker = BackgroundTracker("S", lambda: service)
    for step in range(1, 6):
        tracker.log(step, {})
    tracker.close()
    assert service.taken == [1, 4]
    assert tracker.lost == 3
    assert caplog.text.count("ConnectionError: no answer; the training continues") == 2


def test_a_service_that_comes_later_gets_what_waited() -> None:
    service = Service()
    service.may.set()
    attempts: Iterator[Tracker | Exception] = iter([OSError("refused"), OSError("refused"), service])

    def open_tracker() -> Tracker:
        found = next(attempts)
        if isinstance(found, Exception):
            raise found
        return found

    tracker = BackgroundTracker("S", open_tracker, retry_s=0.01)
    tracker.log(1, {})
    tracker.wait_open(_DEADLINE_S)
    assert service.began.wait(_DEADLINE_S)
    tracker.close()
    assert service.taken == [1]
    assert tracker.lost == 0


def test_wrong_settings_end_the_start() -> None:
    def refuse() -> Tracker:
        raise ConfigError("no key")

    tracker = BackgroundTracker("S", refuse)
    with pytest.raises(ConfigError, match="no key"):
        tracker.wait_open(_DEADLINE_S)
    tracker.close()


def test_a_service_that_never_opens_lets_the_run_begin_and_end(caplog: pytest.LogCaptureFixture) -> None:
    answers = threading.Event()

    def hang() -> Tracker:
        answers.wait(_DEADLINE_S)
        raise OSError("at last")

    tracker = BackgroundTracker("S", hang)
    tracker.wait_open(timeout_s=0.01)
    tracker.log(1, {})
    assert "S is not open yet" in caplog.text
    answers.set()
    tracker.close()
    assert "S lacks 1 records" in caplog.text


def test_wrong_settings_that_are_found_late_are_said(caplog: pytest.LogCaptureFixture) -> None:
    answers = threading.Event()

    def refuse() -> Tracker:
        answers.wait(_DEADLINE_S)
        raise ConfigError("no key")

    tracker = BackgroundTracker("S", refuse)
    tracker.wait_open(0.01)
    answers.set()
    tracker.close()
    assert "S is not used: no key" in caplog.text
