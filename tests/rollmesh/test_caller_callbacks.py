"""Callbacks of the calling process hear of what the learner, another process, appends to a file."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from rollmesh.caller_callbacks import called_back, with_callbacks
from rollmesh.learner.callbacks import (
    Callback,
    CommittedCheckpoint,
    EvaluationEnd,
    PublishedVersion,
    RunEnd,
    RunStart,
    StepEnd,
)
from rollmesh.learner.callbacks.event_file import EVENTS, EventWriter
from rollmesh.learner.callbacks.loading import LearnerControl, callback_factories
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.errors import CallbackError, ConfigError

_DEADLINE_S = 240.0
SENT = [
    RunStart(1, 0),
    PublishedVersion(1, 0),
    StepEnd(1, 1, 1, {"tokens": 3.0}),
    EvaluationEnd(1, 1, 0.5, {"eval/reward": 0.5}),
    CommittedCheckpoint(1, 1, Path("/run/checkpoints/i0001-v00000001")),
    RunEnd("error", "disk full"),
]


class Heard(Callback):
    def __init__(self) -> None:
        self.events: list[Any] = []
        self.stepped = threading.Event()

    def _hear(self, run: Any, event: Any) -> None:
        self.events.append(event)
        if isinstance(event, StepEnd):
            self.stepped.set()

    on_run_start = on_step_end = on_version_published = on_evaluation_end = _hear
    on_checkpoint_committed = on_run_end = _hear


class Odd(Callback):
    def on_step_end(self, run: Any, step: StepEnd, /) -> None:
        raise ValueError(f"odd in {run.folder.name}")


@pytest.fixture
def config(tmp_path: Path) -> Config:
    values = {"model": {"path": "m"}, "data": {"train": "t"}, "run": {"dir": str(tmp_path), "name": "r"}}
    (tmp_path / "r").mkdir()
    return load_config(values)


def write(config: Config, *events: Any) -> None:
    """Does what the learner does."""
    control = LearnerControl(config, "r-1", ControlRequests())
    for event in events:
        event.deliver(EventWriter(), control)


def test_objects_hear_of_all_new_events_as_they_were(config: Config) -> None:
    write(config, RunEnd("of an earlier launch"))
    heard, told = Heard(), []
    with called_back(config, [heard], lambda: told.append("end")):
        write(config, *SENT[:3])
        assert heard.stepped.wait(_DEADLINE_S)
        write(config, *SENT[3:])
    assert heard.events == SENT
    assert told == []


def test_a_run_that_starts_over_is_followed_in_its_new_file(config: Config) -> None:
    write(config, *[RunEnd("of a former run")] * 10)
    heard = Heard()
    (config.run.folder / EVENTS).unlink()
    with called_back(config, [heard], lambda: None):
        write(config, *SENT)
    assert heard.events == SENT


def test_an_object_that_raises_ends_the_run(config: Config) -> None:
    told: list[str] = []
    with pytest.raises(CallbackError, match="Odd raised ValueError at StepEnd: odd in r"):  # noqa: SIM117
        with called_back(config, [Odd()], lambda: told.append("end")):
            write(config, *SENT)
    assert told == ["end"]


def test_paths_go_to_the_learner_and_objects_stay_here(config: Config) -> None:
    own = Heard()
    changed, objects = with_callbacks(config, [own, "mine.py:Mine"])
    assert objects == [own]
    first, writer = changed.logging.callbacks
    assert first == "mine.py:Mine"
    assert callback_factories(with_callbacks(config, [own])[0]) == [EventWriter]
    assert writer.endswith(":EventWriter")
    assert with_callbacks(config, [])[0] == config
    with pytest.raises(ConfigError, match="callbacks: 3 is no callback"):
        with_callbacks(config, [3])  # type: ignore[list-item]
