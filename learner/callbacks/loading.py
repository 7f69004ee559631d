"""Loads the callbacks that a configuration names, and gives them their view of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollmesh.learner.callbacks.dispatcher import CallbackDispatcher, CallbackRules
from rollmesh.learner.callbacks.interface import Callback
from rollmesh.learner.control_requests import REQUEST, ControlRequests
from rollmesh.learner.recovery.run_id import take_run_id
from rollmesh.mesh.config import Config
from rollmesh.mesh.config.trainers.configs import TrainerConfig
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.user_code import load_callable

_KEY = "logging.callbacks"


@dataclass(frozen=True, slots=True)
class LearnerControl:
    """The run, as callbacks in the learner's process see it.

    Attributes:
        config: of the run.
        run_id: by which trackers know it.
        controls: of the learner.
    """

    config: Config | TrainerConfig
    run_id: str
    controls: ControlRequests

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.config.run.folder

    def request_checkpoint(self) -> None:
        """Asks for a checkpoint after the present step."""
        self.controls.request_checkpoint()

    def stop(self) -> None:
        """Asks for the end of the run after the present step."""
        self.controls.stop(REQUEST)


def callback_factories(config: Config | TrainerConfig) -> list[Callable[[], Callback]]:
    """The classes that `logging.callbacks` names.

    Raises:
        ConfigError: one cannot be loaded, or is no class of callbacks.
    """
    return [_factory(path) for path in config.logging.callbacks]


def start_callbacks(config: Config | TrainerConfig, controls: ControlRequests) -> CallbackDispatcher:
    """Makes the callbacks of a learner, and starts their threads.

    Raises:
        ConfigError: one cannot be loaded or made.
    """
    callbacks = [
        _made(path, factory) for path, factory in zip(config.logging.callbacks, callback_factories(config), strict=True)
    ]
    run = LearnerControl(config, take_run_id(config.run.folder, config.run.name), controls)
    rules = CallbackRules(config.logging.callback_errors, config.logging.callback_timeout_s)
    return CallbackDispatcher(callbacks, run, rules, controls.fail)


def _factory(path: str) -> Callable[[], Callback]:
    found = load_callable(path, _KEY, ConfigError)
    if not (isinstance(found, type) and issubclass(found, Callback)):
        raise ConfigError(f"{_KEY} {path}: it is no class of callbacks", hint="derive it from rollmesh.Callback")
    return found


def _made(path: str, factory: Callable[[], Callback]) -> Callback:
    try:
        return factory()
    except Exception as error:  # a user's class may raise anything
        raise ConfigError(
            f"{_KEY} {path}: making it raised {type(error).__name__}: {error}",
            hint="it is made without arguments; its settings may stand in its module, or in the environment",
        ) from error
