"""A backend whose processes end while it sleeps, and start again when it wakes.

Where an engine cannot give its memory back, its processes can. So it sleeps alike on every machine, whatever engine it
is. The price is a start of the engine per sleep. The parent process stays, with what it has imported.

Invariants: asleep without weights there is no process. Weights that come while there are none, or for processes that
have ended, are staged again once there are.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rollmesh.generators.engines.adapters import AdapterWeights
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.external.backend import (
    Backend,
    DecodeChunk,
    DecodeJob,
    LoadMetrics,
    state_of_start,
)
from rollmesh.generators.engines.process_memory import read_process_memory
from rollmesh.generators.engines.request_validation import RequestLimits
from rollmesh.generators.engines.types import SleepLevel, SleepReport, WakeStep
from rollmesh.mesh.liveness.freeze_detector import ProcessState

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
_NO_LOAD = LoadMetrics(0, 0, None, 0)


@dataclass(slots=True, eq=False)
class _Staged:
    """Staged weights.

    Attributes:
        weights: as they came: processes may end before they have loaded them; None once they are another's.
        backend: that staged them; None while there is none.
        staged: its result.
    """

    weights: dict[str, torch.Tensor] | AdapterWeights | None
    backend: Backend | None = None
    staged: Any = None


class RestartingBackend(Backend):
    """A backend over backends, one after the other.

    Args:
        create: a new one, not started; makes all cheap checks.
        restart_timeout_s: seconds that a start after a sleep gets; None: as long as the backend allows.
    """

    def __init__(self, create: Callable[[], Backend], restart_timeout_s: float | None) -> None:
        self._create = create
        self._restart_timeout_s = restart_timeout_s
        # The checks are due now.
        self._next: Backend | None = create()
        self._inner: Backend | None = None
        self._running: Backend | None = None
        self._is_running = asyncio.Event()
        self._asleep = False
        self._on_death: Callable[[str], None]

    async def start(self, on_death: Callable[[str], None]) -> RequestLimits:
        self._on_death = on_death
        begin = time.monotonic()
        limits = await self._start()
        log.info(
            "the engine's processes end for each turn of the learner and start again after it: about %.0f s like this "
            "time, or less where what they import is kept",
            time.monotonic() - begin,
        )
        return limits

    async def generate(self, job: DecodeJob, on_chunk: Callable[[DecodeChunk], None]) -> None:
        await self._backend().generate(job, on_chunk)

    async def abort(self, job_ids: Iterable[str]) -> None:
        if self._running is not None:
            await self._running.abort(job_ids)

    async def pause(self) -> None:
        await self._backend().pause()

    async def resume(self) -> None:
        await self._backend().resume()

    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> _Staged:
        return self._stage(dict(tensors))

    def stage_adapter(self, adapter: AdapterWeights) -> _Staged:
        return self._stage(adapter)

    def interrupts(self, staged: _Staged, *, recompute: bool) -> bool:
        running = self._running
        if running is None or staged.backend is not running:
            # Nothing runs, or all that runs is to be staged again.
            return running is not None
        return running.interrupts(staged.staged, recompute=recompute)

    def _stage(self, weights: dict[str, torch.Tensor] | AdapterWeights) -> _Staged:
        staged = _Staged(weights)
        if self._running is not None:
            self._stage_for(self._running, staged)
        return staged

    async def load(self, staged: _Staged, label: str, *, recompute: bool) -> None:
        if self._running is None:
            await self._start_paused()
        backend = self._backend()
        if staged.backend is not backend:
            weights = staged.weights
            self.discard(staged)
            staged.weights = weights
            await asyncio.to_thread(self._stage_for, backend, staged)
        # From here on it is the other's to give back.
        staged.backend = staged.weights = None
        await backend.load(staged.staged, label, recompute=recompute)

    def discard(self, staged: _Staged) -> None:
        backend, staged.backend, staged.weights = staged.backend, None, None
        if backend is not None:
            backend.discard(staged.staged)

    async def log_probs(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        return await self._backend().log_probs(token_ids)

    async def sleep(self, level: SleepLevel) -> SleepReport:
        backend = self._backend()
        if level < SleepLevel.WITHOUT_WEIGHTS:
            # Its processes have the weights.
            self._asleep = True
            return await backend.sleep(level)
        begin, before = time.perf_counter(), await asyncio.to_thread(read_process_memory)
        self._running = None
        self._is_running.clear()
        await backend.stop()
        # Until here it has processes that have to end.
        self._inner = None
        after = await asyncio.to_thread(read_process_memory)
        return SleepReport(max(0, before.anonymous - after.anonymous), time.perf_counter() - begin)

    async def wake(self, step: WakeStep) -> None:
        if self._running is None:
            await self._start_paused()
        elif self._asleep:
            await self._running.wake(step)
            self._asleep = step < WakeStep.KV_CACHE

    async def ping(self) -> None:
        # The answer is owed while processes start; while there are none, nothing is judged.
        await self._is_running.wait()
        await self._backend().ping()

    def process_state(self) -> ProcessState | None:
        inner = self._inner
        if inner is None:
            return None
        state = inner.process_state()
        return state if self._running is inner else state_of_start(state)

    def last_error(self) -> str:
        return self._inner.last_error() if self._inner is not None else ""

    def load_metrics(self) -> LoadMetrics:
        running = self._running
        return running.load_metrics() if running is not None else _NO_LOAD

    async def stop(self) -> None:
        if self._inner is not None:
            await self._inner.stop()

    def _stage_for(self, backend: Backend, staged: _Staged) -> None:
        weights = staged.weights
        assert weights is not None, "they were given on"
        if isinstance(weights, AdapterWeights):
            staged.staged = backend.stage_adapter(weights)
        else:
            staged.staged = backend.stage(weights.items())
        staged.backend = backend

    async def _start_paused(self) -> None:
        try:
            async with asyncio.timeout(self._restart_timeout_s):
                await self._start()
        except TimeoutError as error:
            raise EngineError(
                f"the engine's processes are not up again after {self._restart_timeout_s} s",
                hint="a larger placement.step_timeout_s allows more, and placement.release: memory needs no start",
            ) from error
        await self._backend().pause()

    async def _start(self) -> RequestLimits:
        if self._inner is not None:
            # It did not come up, or its end was broken off.
            await self._inner.stop()
        self._inner = self._next or self._create()
        self._next, self._asleep = None, False
        limits = await self._inner.start(self._on_death)
        self._running = self._inner
        self._is_running.set()
        return limits

    def _backend(self) -> Backend:
        assert self._running is not None, "it was woken before"
        return self._running
