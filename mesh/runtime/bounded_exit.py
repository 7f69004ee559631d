"""A bound on the exit of a process after its work: Python waits for all threads, and one may wait for a disk."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time

log = logging.getLogger(__name__)


def bound_exit(status: int, within_s: float) -> None:
    """Has the process end with `status` after `within_s` seconds, whatever holds it; returns at once.

    To be called once the status is known and everything is closed: what else threads do is lost.
    """
    threading.Thread(target=_exit_later, args=(status, within_s), name="exit", daemon=True).start()


def _exit_later(status: int, within_s: float) -> None:
    time.sleep(within_s)
    threads = set(threading.enumerate()) - {threading.main_thread()}
    held = sorted(thread.name for thread in threads if not thread.daemon)
    log.warning("no longer waits for %s, and exits with %d", ", ".join(held) or "its exit", status)
    for stream in (sys.stdout, sys.stderr):
        # Closed, or without a reader.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(status)
