"""vLLM's engine that is up, and its answers: it leaves calls unanswered when it dies, and here they fail."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from vllm.v1.engine.async_llm import AsyncLLM

from rollmesh.generators.engines.errors import EngineError

T = TypeVar("T")
# A decode step, or a swap, ends within this; one that hangs is found before (`engine_watch`).
STEP_S = 600.0
SWAP_S = 900.0


class RunningEngine:
    """An engine that is up. Made and used in its event loop.

    Args:
        llm: the engine.
        on_death: called once, when it is gone.

    Attributes:
        llm: see there.
    """

    def __init__(self, llm: AsyncLLM, on_death: Callable[[], None]) -> None:
        self.llm = llm
        self._on_death = on_death
        self._dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_dead(self) -> bool:
        """Whether it is gone."""
        return self._dead.done()

    def died(self) -> None:
        """Records that it is gone: calls that wait for it fail."""
        if not self._dead.done():
            self._dead.set_result(None)
            self._on_death()

    def check_alive(self) -> None:
        """Refuses a call where it is gone.

        Raises:
            EngineError: it has died.
        """
        if self._dead.done():
            raise EngineError("vLLM's engine has died")

    async def answer(self, call: Awaitable[T], deadline_s: float = STEP_S) -> T:
        """Awaits vLLM's answer to a call.

        Raises:
            EngineError: it has died, or does not answer.
        """
        task: asyncio.Future[T] = asyncio.ensure_future(call)
        watched: set[asyncio.Future[Any]] = {task, self._dead}
        try:
            await asyncio.wait(watched, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            task.cancel()
        self.check_alive()
        raise EngineError(f"vLLM has not answered for {deadline_s:.0f} s", hint="see its log")
