"""Signals that ask a process of the learner to end."""

from __future__ import annotations

import logging
import os
import signal
import time

from rollmesh.learner.control_requests import ControlRequests
from rollmesh.mesh.runtime.service import SAME_REQUEST_S

log = logging.getLogger(__name__)


class StopSignals:
    """Handles SIGTERM and SIGINT: rank 0 ends in order, at once after a second one; other ranks ignore them.

    A first one that comes after another request to end changes nothing: platforms send one to all that they end. Some
    send it to all processes of a service, and who has started this one passes it on: those are one request.
    """

    def __init__(self, controls: ControlRequests, *, listen: bool) -> None:
        self._controls = controls
        self._listen = listen
        self._before: dict[signal.Signals, object] = {}
        self._asked_at: float | None = None

    def __enter__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._on_signal if self._listen else signal.SIG_IGN)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # as signal.signal gave it

    def _on_signal(self, number: int, _frame: object) -> None:
        name = signal.Signals(number).name
        now = time.monotonic()
        if self._asked_at is not None:
            if now - self._asked_at > SAME_REQUEST_S:
                os._exit(128 + number)
            return
        self._asked_at = now
        log.info("asked to end by %s", name)
        self._controls.stop(name)
