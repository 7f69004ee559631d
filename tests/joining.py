"""An event for tests: a service says that it waits for a mesh that does not answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NOWHERE = "127.0.0.1:9"
_LOGGER = logging.getLogger("rollmesh.mesh.membership")


class _Listener(logging.Handler):
    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        self._action = action
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.WARNING:
            self.said.append(record.getMessage())
            self._action()


@contextmanager
def when_it_waits(action: Callable[[], object]) -> Iterator[list[str]]:
    """Calls `action` whenever the log of this process says that the mesh does not answer; gives what it says."""
    listener = _Listener(action)
    _LOGGER.addHandler(listener)
    try:
        yield listener.said
    finally:
        _LOGGER.removeHandler(listener)
