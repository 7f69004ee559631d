"""One vLLM for a whole session, in an event loop of its own, lent to one engine after the other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from rollmesh.generators.engines.adapters import AdapterShape, AdapterWeights
from rollmesh.generators.engines.external.backend import Backend, DecodeChunk, DecodeJob, LoadMetrics
from rollmesh.generators.engines.external.model_info import read_folder
from rollmesh.generators.engines.interface import EngineListener, InferenceEngine
from rollmesh.generators.engines.request_validation import RequestLimits
from rollmesh.generators.engines.types import EngineSettings, KvPolicy, SleepLevel, SleepReport, WakeStep
from rollmesh.generators.engines.vllm.engine import VllmEngine
from rollmesh.mesh.config.rollout import VllmSection
from rollmesh.mesh.liveness.freeze_detector import ProcessState
from tests.generators.engines.harness import ModelHarness
from tests.generators.engines.tiny import ContractModel
from tests.generators.engines.vllm.step_gate import StepGate

T = TypeVar("T")
# Importing and starting vLLM takes 20 seconds, and minutes on a machine that is busy with other things.
START_S = 600.0


def settings(
    slots: int, kv: KvPolicy = "keep", device: str = "cpu", adapters: AdapterShape | None = None, **section: Any
) -> EngineSettings:
    """One thread, little memory."""
    chosen = VllmSection(kv_cache_gib=0.125, gpu_memory_utilization=0.3, start_timeout_s=START_S, **section)
    return EngineSettings(slots=slots, kv=kv, device=device, adapters=adapters, vllm=chosen)


class SharedVllm:
    """A backend, started, with its own thread.

    Attributes:
        backend: to be used in its loop alone (`run`).
        limits: of its model.
        cause: what it has died of; None while it lives.
    """

    def __init__(self, folder: Path, chosen: EngineSettings) -> None:
        self.backend: Any = VllmEngine.create_backend(folder, read_folder(folder, None), chosen)
        self.cause: str | None = None
        self.on_death: Callable[[str], None] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.limits: RequestLimits = self.run(self.backend.start(self._on_engine_death))

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """A call of the backend, from any thread but its own."""
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(START_S)

    async def reach(self, call: Coroutine[Any, Any, T]) -> T:
        """The same from another event loop; a cancellation is passed on."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

    def close(self) -> None:
        """May be called twice."""
        if self._loop.is_running():
            self.run(self.backend.stop())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _on_engine_death(self, cause: str) -> None:
        self.cause = cause
        if self.on_death is not None:
            self.on_death(cause)


class LentVllm(Backend):
    """The vLLM of an engine of one test: at its end the jobs are aborted, and vLLM stays."""

    def __init__(self, shared: SharedVllm) -> None:
        self._shared, self._inner = shared, shared.backend
        self._jobs: set[str] = set()

    async def start(self, on_death: Callable[[str], None]) -> RequestLimits:
        loop = asyncio.get_running_loop()
        self._shared.on_death = lambda cause: loop.call_soon_threadsafe(on_death, cause) and None
        return self._shared.limits

    async def generate(self, job: DecodeJob, take: Callable[[DecodeChunk], None]) -> None:
        # Names of jobs repeat from engine to engine.
        mine = DecodeJob(
            f"{id(self)}.{job.job_id}", job.token_ids, job.sampling, job.images, job.seen, job.prompt_tokens
        )
        loop = asyncio.get_running_loop()
        self._jobs.add(mine.job_id)
        try:
            await self._shared.reach(
                self._inner.generate(mine, lambda chunk: loop.call_soon_threadsafe(take, chunk) and None)
            )
        finally:
            self._jobs.discard(mine.job_id)

    async def abort(self, job_ids: Iterable[str]) -> None:
        await self._shared.reach(self._inner.abort([f"{id(self)}.{name}" for name in job_ids]))

    async def pause(self) -> None:
        await self._shared.reach(self._inner.pause())

    async def resume(self) -> None:
        await self._shared.reach(self._inner.resume())

    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Any:
        return self._inner.stage(tensors)

    def stage_adapter(self, adapter: AdapterWeights) -> Any:
        return self._inner.stage_adapter(adapter)

    def interrupts(self, staged: Any, *, recompute: bool) -> bool:
        found: bool = self._inner.interrupts(staged, recompute=recompute)
        return found

    async def load(self, staged: Any, label: str, *, recompute: bool) -> None:
        await self._shared.reach(self._inner.load(staged, label, recompute=recompute))

    def discard(self, staged: Any) -> None:
        self._inner.discard(staged)

    async def log_probs(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        return await self._shared.reach(self._inner.log_probs(token_ids))

    async def sleep(self, level: SleepLevel) -> SleepReport:
        return await self._shared.reach(self._inner.sleep(level))

    async def wake(self, step: WakeStep) -> None:
        await self._shared.reach(self._inner.wake(step))

    async def ping(self) -> None:
        await self._shared.reach(self._inner.ping())

    def process_state(self) -> ProcessState | None:
        return self._inner.process_state()

    def last_error(self) -> str:
        found: str = self._inner.last_error()
        return found

    def load_metrics(self) -> LoadMetrics:
        return self._inner.load_metrics()

    async def stop(self) -> None:
        self._shared.on_death = None
        if self._shared.cause is None:
            await self._shared.reach(self._inner.abort(list(self._jobs)))
            await self._shared.reach(self._inner.resume())


class VllmHarness(ModelHarness):
    """A new engine over the session's vLLM."""

    sleep_frees: ClassVar[bool] = False
    deadline_s: ClassVar[float] = 120.0

    def __init__(self, model: ContractModel, shared: SharedVllm, kv: KvPolicy = "keep") -> None:
        self.shared = shared
        self._settings = settings(self.slots, kv)
        self._spoilt: Any = None
        super().__init__(model)

    @contextmanager
    def slowly(self, tokens: int) -> Iterator[None]:
        """See `EngineHarness.slowly`."""
        with StepGate().at_most(tokens):
            yield

    def fail_at(self, token: int) -> None:
        processor = self.shared.backend._engine.llm.input_processor
        assign = processor.assign_request_id

        def spoil(request: Any) -> None:
            assign(request)
            if token in request.prompt_token_ids:
                # The core fails at it when it takes it up.
                request.prompt_token_ids = None

        processor.assign_request_id = spoil
        self._spoilt = processor

    def close(self) -> None:
        super().close()
        if self._spoilt is not None:
            del self._spoilt.assign_request_id

    def build(self, listener: EngineListener) -> InferenceEngine:
        return VllmEngine(LentVllm(self.shared), read_folder(self.model.folder, None), self._settings, listener)
