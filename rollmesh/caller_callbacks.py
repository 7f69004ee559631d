"""Callbacks in the process that calls `rollmesh.train`: objects that hear of the events of a run in other processes.

The learner appends its events to a file of the run's folder (`learner.callbacks.event_file`), which a thread follows.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from rollmesh.learner.callbacks.dispatcher import CallbackDispatcher, CallbackRules
from rollmesh.learner.callbacks.event_file import EVENTS, EventWriter, parse_event
from rollmesh.learner.callbacks.interface import Callback
from rollmesh.learner.recovery.run_id import RUN_ID
from rollmesh.mesh.config import Config
from rollmesh.mesh.errors import CallbackError, ConfigError, RollmeshError
from rollmesh.report.metrics import MetricsTail
from rollmesh.run_handle import Run

log = logging.getLogger(__name__)
_LOOK_EVERY_S = 0.2
_WRITER = f"{EventWriter.__module__}:{EventWriter.__name__}"


def with_callbacks(config: Config, callbacks: Sequence[Callback | str]) -> tuple[Config, list[Callback]]:
    """The configuration under which all callbacks hear of the run, and those that are objects of this process.

    Args:
        config: of the run.
        callbacks: objects, and paths as in `logging.callbacks`.

    Raises:
        ConfigError: one is neither.
    """
    if wrong := [item for item in callbacks if not isinstance(item, Callback | str)]:
        raise ConfigError(
            f"callbacks: {wrong[0]!r} is no callback",
            hint="derive its class from rollmesh.Callback, and give an object",
        )
    objects = [item for item in callbacks if isinstance(item, Callback)]
    paths = [item for item in callbacks if isinstance(item, str)]
    named = list(dict.fromkeys([*config.logging.callbacks, *paths, *([_WRITER] if objects else [])]))
    return config.model_copy(update={"logging": config.logging.model_copy(update={"callbacks": named})}), objects


@contextmanager
def called_back(config: Config, callbacks: Sequence[Callback], interrupt: Callable[[], None]) -> Iterator[None]:
    """Calls callbacks while the block runs the mesh, and until they have heard of everything.

    Args:
        config: of the run.
        callbacks: objects of this process.
        interrupt: ends the run in order; called where a callback fails and is to end it.

    Raises:
        CallbackError: a callback has ended the run.
    """
    if not callbacks:
        yield
        return
    failures: list[CallbackError] = []

    def fail(error: CallbackError) -> None:
        failures.append(error)
        interrupt()

    rules = CallbackRules(config.logging.callback_errors, config.logging.callback_timeout_s)
    control = _CallerControl(config)
    dispatcher = CallbackDispatcher(callbacks, control, rules, fail)
    follower = _Follower(config.run.folder / EVENTS, dispatcher)
    try:
        yield
    finally:
        follower.close()
        dispatcher.close(rules.timeout_s)
        control.close()
    if failures:
        raise failures[0]


class _Follower:
    """Hands new lines of the event file to the callbacks, in a thread of its own."""

    def __init__(self, path: Path, dispatcher: CallbackDispatcher) -> None:
        self._lines = MetricsTail(path, from_end=True)
        self._dispatcher = dispatcher
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hands over the last lines."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        # Another process's file: there is nothing to wait on.
        while not self._ending.wait(_LOOK_EVERY_S):
            self._read()
        self._read()

    def _read(self) -> None:
        for line in self._lines.read():
            if (event := parse_event(line)) is not None:
                self._dispatcher.emit(event)


class _CallerControl:
    """The run, as callbacks of this process see it; requests travel to the learner in a thread."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._requests = ThreadPoolExecutor(4, "requests of callbacks")

    @property
    def folder(self) -> Path:
        return self.config.run.folder

    @property
    def run_id(self) -> str:
        return (self.folder / RUN_ID).read_text(encoding="utf-8").strip()

    def request_checkpoint(self) -> None:
        # A request whose caller has gone is dropped: the thread waits until the checkpoint is written.
        self._requests.submit(self._ask, Run.request_checkpoint)

    def stop(self) -> None:
        self._requests.submit(self._ask, Run.stop)

    def close(self) -> None:
        self._requests.shutdown(wait=False, cancel_futures=True)

    def _ask(self, request: Callable[[Run], object]) -> None:
        try:
            request(Run(self.folder))
        except RollmeshError as error:
            log.warning("a callback's request was not heard: %s", error)
