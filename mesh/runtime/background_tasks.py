"""Tasks that run in the background of a service, and are kept until they have ended.

Invariants: a task is referenced until its end, which asyncio itself does not do. An error of a task is given to
`on_error` once; a cancellation is no error. All methods belong to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from rollmesh.mesh.telemetry.metric_spec import SpecFactory

FAILURES = SpecFactory("").counter("background_task_failures", "Background tasks that ended by an error")
# The process has one, since owners come and go. A service that has metrics shows it.
FAILED = FAILURES.as_counter()
OnError = Callable[[str, BaseException], None]


class BackgroundTasks:
    """The tasks of one owner, which waits for them or cancels them at its end.

    Args:
        on_error: is called with a task's name and what it has raised.
    """

    def __init__(self, on_error: OnError) -> None:
        self._on_error = on_error
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        """Number of tasks that have not ended."""
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str | None = None) -> asyncio.Task[Any]:
        """Starts a task, and returns it.

        Args:
            work: of the task.
            name: for errors and logs; None: as asyncio names it.
        """
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    async def drain(self, timeout_s: float | None = None) -> int:
        """Waits for the tasks that run now; returns the number of those that have not ended in time."""
        if not self._tasks:
            return 0
        _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
        return len(late)

    def cancel(self) -> None:
        """Asks all tasks to end."""
        for task in list(self._tasks):
            task.cancel()

    async def close(self) -> None:
        """Cancels all tasks, and waits until they have ended, with those that they start at their end."""
        self.cancel()
        while self._tasks:
            await self.drain()

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            FAILED.inc()
            self._on_error(task.get_name(), error)


def log_errors(log: logging.Logger) -> OnError:
    """Logs errors of tasks: for tasks that handle their expected failures themselves."""

    def log_error(name: str, error: BaseException) -> None:
        log.error("%s failed", name, exc_info=error)

    return log_error
