"""A learner that is stopped in a chosen phase of its turns: faults strike while it stands there.

Phases of small models last milliseconds. So the learner is stopped as soon as its record names the phase, and it is
checked that it has not left the phase meanwhile.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.observe import Tail
from tests.faults.processes import FaultError, Process

_PATIENCE_S = 300.0
_POLL_S = 0.001
# Longest time in the phase before the stop: calls of the phase are on their way, or answered, then.
_LATE_S = 0.03


class TurnPhases:
    """Follows `RUN/turns.jsonl`.

    Args:
        path: of the file.
        learner: gives the running learner.
    """

    def __init__(self, path: Path, learner: Callable[[], Process]) -> None:
        self._tail = Tail(path)
        self._learner = learner
        self._dice = random.Random(0)
        self._last = ""

    def stop_learner_in(self, phase: str) -> Process:
        """Stops the learner amid a phase; it stays stopped.

        Raises:
            FaultError: it did not enter the phase, or never stayed in it long enough.
        """
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            if self._present() != phase:
                time.sleep(_POLL_S)
                continue
            late = self._dice.choice((0.0, self._dice.uniform(0.0, _LATE_S)))
            time.sleep(late)
            process = self._learner()
            process.signal(signal.SIGSTOP)
            if self._present() == phase:
                return process
            process.signal(signal.SIGCONT)
        raise FaultError(f"the learner was not stopped in phase {phase} within {_PATIENCE_S:.0f} s")

    def _present(self) -> str:
        for line in self._tail.lines():
            self._last = json.loads(line)["phase"]
        return self._last
