"""Threads for work that would block the event loop: JSON, chat templates, tokenizers.

Invariants: large work runs in a thread, never on the loop, which renews leases and answers others meanwhile. No more
than `threads` pieces of work run at once, and the rest wait in the order in which they came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
# Bytes, characters or tokens that are processed sooner than a thread is woken.
_LITTLE = 2048


class Workers:
    """A few worker threads.

    Args:
        threads: pieces of work at once.
        name: of the threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, size: int, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Runs a piece of work, in a thread where it is large.

        Args:
            size: bytes, characters or tokens that it processes.
            work: touches nothing that belongs to the event loop alone.

        Raises:
            Exception: its own error.
        """
        if size <= _LITTLE:
            return work(*args, **named)
        # Its future is cancelled with the caller: work that has not begun by then never does.
        return await asyncio.wrap_future(self._threads.submit(work, *args, **named))

    def close(self) -> None:
        """Cancels work that has not begun; waits for nothing."""
        self._threads.shutdown(wait=False, cancel_futures=True)
