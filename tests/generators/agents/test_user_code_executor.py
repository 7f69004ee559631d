"""Users' async code that ends or blocks its event loop: the other calls continue."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from rollmesh.generators.agents import user_code_executor
from rollmesh.generators.agents.user_code_executor import UserCodeExecutor


class EndError(BaseException):
    """As frameworks raise them to leave through all of `except Exception`."""


async def fails(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


async def awaited(error: BaseException) -> None:
    await asyncio.create_task(fails(error))


async def gathered(error: BaseException) -> None:
    await asyncio.gather(asyncio.sleep(30), fails(error))


async def grouped(error: BaseException) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(fails(error))


async def grandchild(error: BaseException) -> None:
    await asyncio.create_task(awaited(error))


async def called_back(error: BaseException) -> str:
    """Raises in a callback: no task gets it."""

    def leave() -> None:
        raise error

    asyncio.get_running_loop().call_soon(leave)
    await asyncio.sleep(0.01)
    return "done"


async def left_alone(error: BaseException) -> str:
    """Raises in a task that nothing waits for."""
    task = asyncio.create_task(fails(error))
    while not task.done():
        await asyncio.sleep(0)
    return "done"


async def stopped() -> str:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)
    return "done"


async def where() -> int:
    return threading.get_ident()


@pytest.fixture
async def calls() -> AsyncIterator[UserCodeExecutor]:
    executor = UserCodeExecutor(workers=2)
    yield executor
    executor.close()


async def beside(calls: UserCodeExecutor, call: Callable[[], Awaitable[Any]]) -> Any:
    """A call's end, while another one runs on the same loop, which ends well and is not cut short."""
    gate = asyncio.Event()
    loops: queue.SimpleQueue[asyncio.AbstractEventLoop] = queue.SimpleQueue()

    async def waits() -> int:
        loops.put(asyncio.get_running_loop())
        await gate.wait()
        return await where()

    other = asyncio.ensure_future(calls.call(waits, timeout_s=180))
    loop = await asyncio.to_thread(loops.get, timeout=180)
    try:
        async with asyncio.timeout(180):
            return await calls.call(call, timeout_s=180)
    finally:
        loop.call_soon_threadsafe(gate.set)
        assert await other == await calls.call(where, timeout_s=180)


@pytest.mark.parametrize("agent", [awaited, gathered, grouped, grandchild])
@pytest.mark.parametrize("error", [SystemExit("not authenticated"), KeyboardInterrupt("no"), EndError("so")])
async def test_what_a_child_task_raises_ends_its_call_alone(
    calls: UserCodeExecutor, agent: Callable[[BaseException], Awaitable[Any]], error: BaseException
) -> None:
    async def solve() -> None:
        await agent(error)

    with pytest.raises(RuntimeError, match=f"^{type(error).__name__}: {error}$"):
        await beside(calls, solve)


@pytest.mark.parametrize("agent", [called_back, left_alone])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), EndError()])
async def test_what_nothing_waits_for_ends_no_call(
    calls: UserCodeExecutor, agent: Callable[[BaseException], Awaitable[Any]], error: BaseException
) -> None:
    async def solve() -> Any:
        return await agent(error)

    assert await beside(calls, solve) == "done"


async def test_a_loop_that_is_stopped_continues(calls: UserCodeExecutor) -> None:
    assert await beside(calls, stopped) == "done"


async def test_a_loop_that_has_ended_is_replaced(calls: UserCodeExecutor) -> None:
    await calls.call(where, timeout_s=180)
    ended = calls._agents
    assert ended is not None
    await asyncio.to_thread(ended.close)
    assert await calls.call(where, timeout_s=180)
    assert calls._agents is not ended


async def test_a_loop_that_is_blocked_when_its_call_is_given_up_is_replaced(
    calls: UserCodeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_code_executor, "_ANSWER_S", 0.0)
    reached, let_go = threading.Event(), threading.Event()

    async def blocks() -> None:
        reached.set()
        let_go.wait(180)

    given_up = asyncio.ensure_future(calls.call(blocks, timeout_s=600))
    await asyncio.to_thread(reached.wait, 180)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    async with asyncio.timeout(180):
        while calls._agents is not None:
            await asyncio.sleep(0)
        assert await calls.call(where, timeout_s=180)
    let_go.set()


async def test_a_call_that_another_one_cancels_has_failed(calls: UserCodeExecutor) -> None:
    async def cancels_all() -> None:
        for task in asyncio.all_tasks():
            task.cancel()

    other = asyncio.ensure_future(calls.call(partial(asyncio.sleep, 30), timeout_s=60))
    await calls.call(partial(asyncio.sleep, 0), timeout_s=60)
    with pytest.raises(RuntimeError, match="CancelledError"):
        await calls.call(cancels_all, timeout_s=60)
    with pytest.raises(RuntimeError, match="CancelledError: other code"):
        await other
    await calls.call(partial(asyncio.sleep, 0), timeout_s=60)
