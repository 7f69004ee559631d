"""A bridge from synchronous code to an event loop that runs in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import uvloop

from rollmesh.mesh.errors import UnreachableError

T = TypeVar("T")


def _is_done_within(future: concurrent.futures.Future[Any], timeout_s: float) -> bool:
    return bool(concurrent.futures.wait([future], timeout_s).done)


class AsyncBridge:
    """An event loop in a thread of its own, for programs that compute in the main thread.

    Every call has a deadline; errors arrive as they were raised.
    """

    def __init__(self, name: str = "rpc") -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Starts a coroutine and returns at once."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Runs a coroutine and waits for its result; see `result`."""
        return self.result(self.submit(coroutine), timeout_s)

    def result(
        self,
        submitted: concurrent.futures.Future[T],
        timeout_s: float,
        *,
        wait: Callable[[concurrent.futures.Future[Any], float], bool] = _is_done_within,
    ) -> T:
        """Waits for the result of a coroutine that `submit` has started.

        Args:
            submitted: as `submit` gave it.
            timeout_s: of the wait.
            wait: waits for a future, for this many seconds at most; True if it is done.

        Raises:
            UnreachableError: there is no result after `timeout_s`; the coroutine is cancelled.
        """
        if not wait(submitted, timeout_s):
            submitted.cancel()
            raise UnreachableError(
                f"no result from the mesh within {timeout_s:.0f} s", hint="`rollmesh status` says which services answer"
            )
        return submitted.result()

    def close(self) -> None:
        """Cancels running coroutines and ends the thread."""

        async def cancel_all() -> None:
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.submit(cancel_all()).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
