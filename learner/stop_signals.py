"""Signals that ask a process of the learner to end."""

from __future__ import annotations

import signal

from rollmesh.learner.control_requests import ControlRequests
from rollmesh.mesh.runtime.end_signals import EndSignals, end_signals


class StopSignals:
    """Handles SIGTERM and SIGINT: rank 0 ends as `EndSignals` says, other ranks ignore them."""

    def __init__(self, controls: ControlRequests, *, listen: bool) -> None:
        self._controls = controls
        self._listen = listen
        self._before: dict[signal.Signals, object] = {}
        self._signals = EndSignals()

    def __enter__(self) -> None:
        for number in end_signals():
            self._before[number] = signal.signal(number, self._on_signal if self._listen else signal.SIG_IGN)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # as signal.signal gave it

    def _on_signal(self, number: int, _frame: object) -> None:
        if self._signals.is_first(number):
            self._controls.stop(signal.Signals(number).name)
