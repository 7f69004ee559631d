"""Says in the log, every minute, what the start of a learner does and for how long."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)
_EVERY_S = 60.0


@contextmanager
def note_every_minute(work: str, *, every_s: float = _EVERY_S) -> Iterator[None]:
    """Logs for how long the block has lasted.

    Args:
        work: what it does, such as `loads models`.
        every_s: seconds between two lines.
    """
    over, began = threading.Event(), time.monotonic()

    def note() -> None:
        while not over.wait(every_s):
            log.info("%s for %.0f s", work, time.monotonic() - began)

    threading.Thread(target=note, name="start notice", daemon=True).start()
    try:
        yield
    finally:
        over.set()
