"""The records of a training, on rank 0: trackers get them, and callbacks hear of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmesh.learner.callbacks.interface import EvaluationEnd, RunEnd, RunStart, StepEnd
from rollmesh.learner.callbacks.loading import start_callbacks
from rollmesh.learner.control_requests import ControlRequests
from rollmesh.learner.metrics import MetricsWriter, open_trackers
from rollmesh.learner.metrics.trackers.interface import numbers
from rollmesh.mesh.config.trainers.configs import TrainerConfig

_ERROR_S = 10.0
_HELD_OUT = "eval/"


class Records:
    """Takes the records of steps.

    Args:
        config: of the run.
        controls: by which callbacks ask for the end, or for a checkpoint.
        steps: of the whole run.

    Attributes:
        callbacks: hear of the run's events.

    Raises:
        ConfigError: a callback or a tracker cannot be used.
    """

    def __init__(self, config: TrainerConfig, controls: ControlRequests, steps: int) -> None:
        self._timeout_s = config.logging.callback_timeout_s
        self._controls, self._steps = controls, steps
        self._incarnation = 0
        self.callbacks = start_callbacks(config, controls)
        self._writer = MetricsWriter(open_trackers(config))

    def begin(self, incarnation: int, start: int) -> None:
        """Tells of the begin.

        Args:
            incarnation: of this process's start.
            start: steps that are done.
        """
        self._incarnation = incarnation
        self.callbacks.emit(RunStart(incarnation, start))

    def log(self, step: int, record: Mapping[str, Any]) -> None:
        """Takes the record of a step, which counts from 1."""
        whole = {**record, "steps": self._steps, **self._writer.lost_records(), **self.callbacks.metrics()}
        self._writer.log(step, whole)
        values = numbers(whole)
        self.callbacks.emit(StepEnd(step, self._incarnation, step, values))
        if held_out := {name: value for name, value in values.items() if name.startswith(_HELD_OUT)}:
            self.callbacks.emit(EvaluationEnd(self._incarnation, step, None, held_out))

    def close(self, reason: str, error: str = "") -> None:
        """Writes what waits, and tells of the end.

        Args:
            reason: see `RunEnd`.
            error: that has ended the training.

        Raises:
            CallbackError: one has failed, and is to end the run; not where an error has ended it already.
        """
        self._writer.close()
        if self._incarnation:
            self.callbacks.emit(RunEnd(reason, error))
        self.callbacks.close(_ERROR_S if error else self._timeout_s)
        if not error:
            self._controls.raise_failure()
