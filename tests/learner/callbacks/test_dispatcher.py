"""Callbacks are called in order, delay nothing, and fail by name."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any, Literal

import pytest

from rollmesh.learner.callbacks import Callback, PublishedVersion, RunEnd, RunStart, StepEnd
from rollmesh.learner.callbacks.dispatcher import LIMIT, CallbackDispatcher, CallbackRules
from rollmesh.learner.callbacks.interface import Event
from rollmesh.learner.callbacks.loading import callback_factories, start_callbacks
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.mesh.access.code_permissions import requested_code
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.errors import CallbackError, ConfigError

_DEADLINE_S = 240.0


class Heard(Callback):
    """Notes what it hears; may wait before it takes a step, or raise."""

    def __init__(self, *, error: BaseException | None = None) -> None:
        self.events: list[Any] = []
        self.may = threading.Event()
        self.began = threading.Event()
        self.may.set()
        self._error = error

    def on_run_start(self, run: Any, start: RunStart) -> None:
        self.events.append(start)

    def on_step_end(self, run: Any, step: StepEnd) -> None:
        self.began.set()
        assert self.may.wait(_DEADLINE_S)
        self.events.append(step.step)
        if self._error is not None:
            raise self._error

    def on_run_end(self, run: Any, end: RunEnd) -> None:
        self.events.append(end)


class Failures(list[CallbackError]):
    """The errors that end the run."""


def dispatcher(
    *callbacks: Callback, on_error: Literal["stop", "log"] = "stop", timeout_s: float = _DEADLINE_S
) -> tuple[CallbackDispatcher, Failures]:
    failures = Failures()
    run: Any = None
    return CallbackDispatcher(callbacks, run, CallbackRules(on_error, timeout_s), failures.append), failures


def step(number: int) -> StepEnd:
    return StepEnd(number, 1, number, {"critic/score/mean": 0.5})


def config(folder: Path, *callbacks: str, **keys: Any) -> Config:
    return load_config(
        {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "run": {"dir": str(folder), "name": "r"},
            "logging": {"callbacks": callbacks, **keys},
        }
    )


def test_all_hear_everything_in_order() -> None:
    first, second = Heard(), Heard()
    events, failures = dispatcher(first, second)
    sent: list[Event] = [RunStart(1, 0), step(1), PublishedVersion(1, 1), step(2), RunEnd("steps")]
    for event in sent:
        events.emit(event)
    events.close(_DEADLINE_S)
    assert first.events == second.events == [sent[0], 1, 2, sent[-1]]
    assert failures == []
    assert events.metrics() == {"callbacks/failed": 0}


def test_one_that_waits_delays_no_other() -> None:
    slow, quick = Heard(), Heard()
    slow.may.clear()
    events, _ = dispatcher(slow, quick)
    events.emit(step(1))
    assert quick.began.wait(_DEADLINE_S)
    slow.may.set()
    events.close(_DEADLINE_S)
    assert slow.events == quick.events == [1]


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit("odd")])
def test_an_error_ends_the_run_once_and_names_the_callback(error: BaseException) -> None:
    callback = Heard(error=error)
    events, failures = dispatcher(callback)
    for number in (1, 2, 3):
        events.emit(step(number))
    events.close(_DEADLINE_S)
    assert callback.events == [1, 2, 3], "it is called all the same until the run has ended"
    (failure,) = failures
    assert failure.message == f"callback Heard raised {type(error).__name__} at StepEnd: odd"
    assert failure.exit_code == 18
    assert events.metrics() == {"callbacks/failed": 3}


def test_an_error_may_be_logged_only(caplog: pytest.LogCaptureFixture) -> None:
    events, failures = dispatcher(Heard(error=ValueError("odd")), on_error="log")
    with caplog.at_level(logging.WARNING):
        events.emit(step(1))
        events.close(_DEADLINE_S)
    assert failures == []
    assert "raised ValueError at StepEnd: odd; the training continues" in caplog.text
    assert "Traceback" in caplog.text


def test_one_that_hangs_is_found_at_the_next_event_and_left_out() -> None:
    callback = Heard()
    callback.may.clear()
    events, failures = dispatcher(callback, timeout_s=1e-6)
    events.emit(step(1))
    assert callback.began.wait(_DEADLINE_S)
    events.emit(step(2))
    events.emit(step(3))
    (failure,) = failures
    assert "callback Heard has handled StepEnd for 0 s, and is not called any more" in failure.message
    callback.may.set()
    events.close(_DEADLINE_S)
    assert len(failures) == 1


def test_one_that_hangs_at_the_end_lets_the_run_end() -> None:
    callback = Heard()
    callback.may.clear()
    events, failures = dispatcher(callback)
    events.emit(step(1))
    assert callback.began.wait(_DEADLINE_S)
    events.close(0.0)
    assert "has not handled the last events in time" in failures[0].message
    callback.may.set()


def test_one_that_is_far_behind_is_left_out() -> None:
    callback = Heard()
    callback.may.clear()
    events, failures = dispatcher(callback)
    events.emit(step(0))
    assert callback.began.wait(_DEADLINE_S)
    for number in range(LIMIT + 1):
        events.emit(step(number))
    assert f"is late by {LIMIT} events" in failures[0].message
    callback.may.set()
    events.close(_DEADLINE_S)


_FILE = """
import rollmesh

class Asks(rollmesh.Callback):
    def on_step_end(self, run, step):
        run.request_checkpoint()
        run.stop()
        (run.folder / "heard").write_text(run.run_id)

class Needs(rollmesh.Callback):
    def __init__(self, something):
        pass

class Other:
    pass
"""


def test_a_callback_of_a_file_asks_for_a_checkpoint_and_for_the_end(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(_FILE)
    controls = ControlRequests()
    run = config(tmp_path, f"{tmp_path / 'mine.py'}:Asks")
    events = start_callbacks(run, controls)
    events.emit(step(1))
    events.close(_DEADLINE_S)
    assert controls.stop_reason == "request"
    assert len(controls.pop_checkpoint_requests()) == 1
    assert (tmp_path / "r" / "heard").read_text() == (tmp_path / "r" / "run_id").read_text().strip()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Absent", "no function 'Absent'"),
        ("Other", "it is no class of callbacks"),
        ("Needs", "making it raised TypeError"),
    ],
)
def test_what_is_no_callback_is_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(_FILE)
    with pytest.raises(ConfigError, match=message):
        start_callbacks(config(tmp_path, f"{tmp_path / 'mine.py'}:{name}"), ControlRequests())


def test_no_other_service_executes_callbacks(tmp_path: Path) -> None:
    run = config(tmp_path, "mine.py:Mine")
    assert requested_code(run) == []
    assert callback_factories(config(tmp_path)) == []
