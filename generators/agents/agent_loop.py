"""The event loop of users' coroutines, in a thread of its own.

Invariant: nothing that they raise or call ends it before it is closed. A SystemExit in any task or callback ends a loop
of asyncio; this one continues with all others.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Coroutine
from typing import Any

import uvloop

log = logging.getLogger(__name__)
# Seconds in which tasks that are cancelled have to end.
_CLOSE_S = 10.0


class AgentLoop:
    """An event loop; its methods may be called from any thread."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="agent-loop", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it runs what is submitted."""
        return self._thread.is_alive()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Starts a coroutine and returns at once."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def ask(self) -> threading.Event:
        """Asks whether it answers: the event is set as soon as it does, and at once where it has been closed."""
        answered = threading.Event()
        try:
            self._loop.call_soon_threadsafe(answered.set)
        except RuntimeError:
            answered.set()
        return answered

    def close(self) -> None:
        """Cancels what runs, and ends the thread; waits for both."""
        self.submit(self._cancel_all()).result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._stop)
        self._thread.join(_CLOSE_S)
        self._loop.close()

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._loop.run_forever()
            except BaseException as error:
                if self._loop.is_closed():
                    raise
                log.warning("%s in a task of an agent, tool or environment: the others continue", type(error).__name__)

    def _stop(self) -> None:
        self._is_closing = True
        self._loop.stop()

    async def _cancel_all(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
