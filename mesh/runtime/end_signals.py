"""Signals that ask a process to end: the first one in order, a second one at once.

SIGINT and SIGHUP stay ignored if the caller ignores them, as with the system's own commands. A script's shell does
so with SIGINT for what it starts with `&`, because Ctrl-C is for the foreground; `nohup` does so with SIGHUP.
"""

from __future__ import annotations

import logging
import os
import signal
import time

log = logging.getLogger(__name__)
# Seconds within which a second signal is the first one again. Some platforms send one to all processes of a service,
# and the process that has started the others passes it on.
_SAME_REQUEST_S = 1.0


def end_signals(*, hangup: bool = False) -> list[signal.Signals]:
    """Signals that ask this process to end; asked before it handles any.

    Args:
        hangup: the loss of the terminal is one.
    """
    others = [signal.SIGINT, *([signal.SIGHUP] if hangup else [])]
    return [signal.SIGTERM, *(number for number in others if signal.getsignal(number) is not signal.SIG_IGN)]


class EndSignals:
    """Tells the first signal from later ones.

    A first one after another request to end (a notice, an RPC) changes nothing: platforms send one to all that they
    end.
    """

    def __init__(self) -> None:
        self._asked_at: float | None = None

    def is_first(self, number: int) -> bool:
        """True for the first signal, which the log names; a second one ends the process here and now."""
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            log.info("asked to end by %s", signal.Signals(number).name)
            return True
        if now - self._asked_at > _SAME_REQUEST_S:
            os._exit(128 + number)
        return False
