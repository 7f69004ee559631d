"""The interface of callbacks: the events of a run, the methods that hear of them, and what a callback may ask of it.

A callback may override any of the methods. It never delays the training: it hears of each event after it has happened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rollmesh.mesh.config import Config
from rollmesh.mesh.config.trainers.configs import TrainerConfig


class RunControl(Protocol):
    """The run, as a callback sees it; its methods return at once."""

    @property
    def config(self) -> Config | TrainerConfig:
        """The configuration; not to be changed."""
        ...

    @property
    def folder(self) -> Path:
        """The run's folder."""
        ...

    @property
    def run_id(self) -> str:
        """The id by which trackers know the run."""
        ...

    def request_checkpoint(self) -> None:
        """Asks for a checkpoint after the present step; `on_checkpoint_committed` hears of it."""
        ...

    def stop(self) -> None:
        """Asks for the end of the run after the present step, with a checkpoint; the run counts as finished."""
        ...


class Callback:
    """Hears of the events of a run; to be derived from.

    Each callback has a thread of its own, in the process of the learner's rank 0. An object that `rollmesh.train` was
    given has it in the caller's. Its calls come one after another, `on_run_start` first and `on_run_end` last; those of
    one kind in the order of their versions. A learner that is started again after a crash makes its callbacks again.
    It trains the steps since the last checkpoint again, and reports them again.
    """

    def on_run_start(self, run: RunControl, start: RunStart, /) -> None:
        """A learner has taken the run over, and is about to train."""

    def on_step_end(self, run: RunControl, step: StepEnd, /) -> None:
        """A batch was trained."""

    def on_version_published(self, run: RunControl, version: PublishedVersion, /) -> None:
        """Generators may fetch a version, and it is in force."""

    def on_evaluation_end(self, run: RunControl, evaluation: EvaluationEnd, /) -> None:
        """A round of evaluation has its result."""

    def on_checkpoint_committed(self, run: RunControl, checkpoint: CommittedCheckpoint, /) -> None:
        """A checkpoint is durable, and the run continues from it."""

    def on_run_end(self, run: RunControl, end: RunEnd, /) -> None:
        """This learner trains no more; all its files are written."""


class Event(Protocol):
    """An event of a run."""

    def deliver(self, callback: Callback, run: RunControl) -> None:
        """Calls the callback's method for it."""
        ...


class EventSink(Protocol):
    """Takes the events of a run, from any thread; `learner.callbacks.dispatcher.CallbackDispatcher` calls callbacks."""

    def emit(self, event: Event) -> None:
        """Takes an event, at once."""
        ...

    def metrics(self) -> Mapping[str, int]:
        """Metrics of the callbacks so far."""
        ...


class NoCallbacks:
    """Takes events for no one, as in a replay."""

    def emit(self, event: Event) -> None:
        """Does nothing."""

    def metrics(self) -> Mapping[str, int]:
        """None."""
        return {}


NO_CALLBACKS = NoCallbacks()


@dataclass(frozen=True, slots=True)
class RunStart:
    """The begin of a learner's work.

    Attributes:
        incarnation: of the learner: 1 for the first, one more for each that continues the run.
        version: from which it continues; 0 in a new run. A training on data counts its steps.
    """

    incarnation: int
    version: int

    def deliver(self, callback: Callback, run: RunControl) -> None:
        callback.on_run_start(run, self)


@dataclass(frozen=True, slots=True)
class StepEnd:
    """A trained batch.

    Attributes:
        step: batches trained over the whole run, this one included.
        incarnation, version: of the weights that it made.
        metrics: its record in `metrics.jsonl`, as far as it is made of numbers.
    """

    step: int
    incarnation: int
    version: int
    metrics: Mapping[str, float]

    def deliver(self, callback: Callback, run: RunControl) -> None:
        callback.on_step_end(run, self)


@dataclass(frozen=True, slots=True)
class PublishedVersion:
    """A version of the weights in force.

    Attributes:
        incarnation, version: of the weights.
    """

    incarnation: int
    version: int

    def deliver(self, callback: Callback, run: RunControl) -> None:
        callback.on_version_published(run, self)


@dataclass(frozen=True, slots=True)
class EvaluationEnd:
    """The result of a round of evaluation.

    Attributes:
        incarnation, version: of the weights that were evaluated, which may not be the newest ones.
        reward: mean over the scored responses; None in a training on data, whose metrics have `eval/loss`.
        metrics: its record in `metrics.jsonl`, as far as it is made of numbers.
    """

    incarnation: int
    version: int
    reward: float | None
    metrics: Mapping[str, float]

    def deliver(self, callback: Callback, run: RunControl) -> None:
        callback.on_evaluation_end(run, self)


@dataclass(frozen=True, slots=True)
class CommittedCheckpoint:
    """A checkpoint that is durable.

    Attributes:
        incarnation, version: of its weights.
        folder: its folder; `checkpoint.keep` says how long it stays.
    """

    incarnation: int
    version: int
    folder: Path

    def deliver(self, callback: Callback, run: RunControl) -> None:
        callback.on_checkpoint_committed(run, self)


@dataclass(frozen=True, slots=True)
class RunEnd:
    """The end of a learner's work.

    Attributes:
        reason: steps, stop_at, end_of_data, request, the name of a signal, or `error`.
        error: in words; empty where none has ended the run.
    """

    reason: str
    error: str = ""

    def deliver(self, callback: Callback, run: RunControl) -> None:
        callback.on_run_end(run, self)
