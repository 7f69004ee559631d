"""Memory of the devices, given back while vLLM sleeps and taken again. On a CPU vLLM keeps all of it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from rollmesh.generators.engines.types import SleepLevel, SleepReport, WakeStep
from rollmesh.generators.engines.vllm.running_engine import SWAP_S, RunningEngine
from rollmesh.generators.engines.vllm.worker import HELD_BYTES

_WEIGHTS, _KV_CACHE = "weights", "kv_cache"


class DeviceMemory:
    """The device memory of one engine.

    Args:
        engine: that holds it.
        on_cpu: vLLM computes on a CPU.
    """

    def __init__(self, engine: RunningEngine, *, on_cpu: bool) -> None:
        self._engine = engine
        self._on_cpu = on_cpu
        self._asleep: set[str] = set()

    async def sleep(self, level: SleepLevel, forget_weights: Callable[[], Awaitable[None]]) -> SleepReport:
        """See `Backend.sleep`; `forget_weights` is called where the workers have dropped theirs."""
        begin = time.perf_counter()
        if self._on_cpu:
            # vLLM's CPU worker ignores it: weights and KV cache stay where they are.
            return SleepReport(0, time.perf_counter() - begin)
        # Else vLLM keeps the host's copy. The KV cache stays away: it passes over what is asleep.
        await self.wake(WakeStep.WEIGHTS)
        before = await self.held_bytes()
        drops = level >= SleepLevel.WITHOUT_WEIGHTS
        await self._engine.answer(self._engine.llm.sleep(level=2 if drops else 1, mode="keep"), SWAP_S)
        if drops:
            await forget_weights()
        self._asleep = {_WEIGHTS, _KV_CACHE}
        return SleepReport(before - await self.held_bytes(), time.perf_counter() - begin)

    async def wake(self, step: WakeStep) -> bool:
        """Takes memory again; returns whether that was the last of it; vLLM then continues by itself."""
        parts = self._asleep if step >= WakeStep.KV_CACHE else self._asleep & {_WEIGHTS}
        if not parts:
            return False
        await self._engine.answer(self._engine.llm.engine_core.wake_up_async(sorted(parts)), SWAP_S)
        self._asleep = self._asleep - parts
        return not self._asleep

    async def held_bytes(self) -> int:
        """Bytes that all workers hold of their devices and give back asleep."""
        return await self.sum_over_workers(HELD_BYTES)

    async def sum_over_workers(self, method: str) -> int:
        """The sum of what a method of the workers returns, over all of them."""
        core = self._engine.llm.engine_core
        replies = core.call_utility_all_async("collective_rpc", method, None, (), None)
        return sum(sum(workers) for workers in await self._engine.answer(replies))
