"""Handling of signals that a test asks about: the caller's is not known, as a script's `&` ignores SIGINT."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def handled(
    number: signal.Signals, handler: Callable[[int, FrameType | None], object] | signal.Handlers
) -> Iterator[None]:
    """Handles a signal in this way within the block. Processes that are started there inherit that it is ignored."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)
