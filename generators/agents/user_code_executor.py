"""Runs the code of users, tools and environments, outside of the event loop.

Invariants: no user code runs in the generator's event loop: plain functions run in threads, coroutines on a loop of
their own. Every call ends in its result, in its own error, or in `OverdueError` when its time is up. A thread that does
not return is abandoned (it cannot be ended from outside) and replaced, up to `_MAX_LOST` at a time. So is a loop that
does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from rollmesh.generators.agents.agent_loop import AgentLoop
from rollmesh.generators.agents.values import describe_error

log = logging.getLogger(__name__)
_MAX_LOST = 64
# Seconds that a live loop has to report its own time-outs before it counts as blocked.
_GRACE_S = 0.5
# Seconds that it has to answer after a call was cancelled.
_ANSWER_S = 5.0


class OverdueError(Exception):
    """A call did not end in time."""


class _Call:
    """A call of a plain function."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._loop = asyncio.get_running_loop()
        self.done: asyncio.Future[Any] = self._loop.create_future()
        self.done.add_done_callback(_retrieve_exception)

    def run(self, returned: Callable[[], None]) -> None:
        """Runs the function; in a thread."""
        try:
            result, error = self._function(), None
        except BaseException as raised:  # noqa: BLE001 - a user's code may raise anything, SystemExit included
            result, error = None, raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits
            self._loop.call_soon_threadsafe(self._finish, result, error, returned)

    def _finish(self, result: Any, error: BaseException | None, returned: Callable[[], None]) -> None:
        returned()
        if self.done.done():
            return
        if error is None:
            self.done.set_result(result)
        else:
            self.done.set_exception(_as_exception(error))


class UserCodeExecutor:
    """Calls into user code; all methods belong to the event loop's thread.

    Args:
        workers: plain functions that run at once.

    Attributes:
        lost: abandoned threads that have not returned.
    """

    def __init__(self, workers: int) -> None:
        self._free = asyncio.Semaphore(workers)
        self._jobs: queue.SimpleQueue[tuple[_Call, Callable[[], None]] | None] = queue.SimpleQueue()
        self._idle = 0
        self._threads = 0
        self._agents: AgentLoop | None = None
        self.lost = 0

    async def call(self, function: Callable[[], Any], *, timeout_s: float) -> Any:
        """Calls a plain or async function, arguments bound (`functools.partial`); its time counts from its start.

        Raises:
            OverdueError: it did not end in time.
            Exception: its own error.
        """
        if inspect.iscoroutinefunction(function):
            return await self._on_loop(function(), timeout_s)
        result = await self._in_thread(function, timeout_s)
        return await self._on_loop(result, timeout_s) if inspect.iscoroutine(result) else result

    def close(self) -> None:
        """Ends threads and loop; calls that hang are left to the end of the process (the threads are daemons)."""
        for _ in range(self._threads):
            self._jobs.put(None)
        if self._agents is not None and self._agents.is_running:
            threading.Thread(target=self._agents.close, name="agent-loop-close", daemon=True).start()
        self._agents = None

    async def _in_thread(self, function: Callable[[], Any], timeout_s: float) -> Any:
        await self._free.acquire()
        state = {"permit": True, "lost": False}

        def returned() -> None:
            self._idle += 1
            if state["lost"]:
                self.lost -= 1
            if state["permit"]:
                self._free.release()
                state["permit"] = False

        call = _Call(function)
        if self._idle:
            self._idle -= 1
        else:
            self._threads += 1
            threading.Thread(target=self._work, name="agent", daemon=True).start()
        self._jobs.put((call, returned))
        try:
            done, _ = await asyncio.wait((call.done,), timeout=timeout_s)
        except asyncio.CancelledError:
            if not call.done.done():
                self._abandon(state)
            raise
        if not done:
            self._abandon(state)
            call.done.cancel()
            raise OverdueError(f"no answer within {timeout_s:g} s")
        return call.done.result()

    def _abandon(self, state: dict[str, bool]) -> None:
        """Abandons its thread, which is replaced unless too many are lost."""
        state["lost"] = True
        self.lost += 1
        if self.lost <= _MAX_LOST:
            self._free.release()
            state["permit"] = False
        else:
            log.warning("%d calls of tools or environments hang in this process", self.lost)

    async def _on_loop(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        if self._agents is None or not self._agents.is_running:
            self._agents = AgentLoop()
        agents = self._agents
        future = asyncio.wrap_future(agents.submit(_run_within(coroutine, timeout_s)))
        future.add_done_callback(_retrieve_exception)
        try:
            done, _ = await asyncio.wait((future,), timeout=timeout_s + _GRACE_S)
        except asyncio.CancelledError:
            future.cancel()
            asyncio.get_running_loop().call_later(_ANSWER_S, self._expect, agents.ask(), agents)
            raise
        if not done:
            future.cancel()
            self._abandon_loop(agents)
            raise OverdueError(f"no answer within {timeout_s:g} s")
        if future.cancelled():
            # Not by its caller, who would not be here.
            raise RuntimeError("CancelledError: other code on its event loop has cancelled it")
        return future.result()

    def _expect(self, answered: threading.Event, agents: AgentLoop) -> None:
        if not answered.is_set():
            self._abandon_loop(agents)

    def _abandon_loop(self, agents: AgentLoop) -> None:
        """Gives later calls another loop."""
        if self._agents is agents:
            log.warning("an async agent, tool or environment blocks its event loop; the loop is abandoned")
            self._agents = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, returned = job
            call.run(returned)


async def _run_within(coroutine: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
    task = asyncio.ensure_future(_guarded(coroutine))
    try:
        done, _ = await asyncio.wait((task,), timeout=timeout_s)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        raise OverdueError(f"no answer within {timeout_s:g} s")
    return task.result()


async def _guarded(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Turns SystemExit or CancelledError of a user's code, which would end a task or a loop, into a plain error."""
    try:
        return await coroutine
    except Exception:
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise _as_exception(error) from error


def _as_exception(error: BaseException) -> Exception:
    """The same error in a form that has no special meaning in an event loop's task."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(describe_error(error))


def _retrieve_exception(future: asyncio.Future[Any]) -> None:
    """Retrieves the exception, which may have no reader any more."""
    if not future.cancelled():
        future.exception()
