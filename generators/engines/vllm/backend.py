"""vLLM as a backend: its start and end, its pauses, and the parts that do the rest.

Invariant: the cause of vLLM's death is reported once, and every call that waits for it fails.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.platforms import current_platform
from vllm.v1.engine.exceptions import EngineDeadError

from rollmesh.generators.engines.adapters import AdapterWeights
from rollmesh.generators.engines.checkpoint_names import CheckpointLayout
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.external.backend import Backend, DecodeChunk, DecodeJob, LoadMetrics
from rollmesh.generators.engines.external.model_info import ModelInfo
from rollmesh.generators.engines.external.served_adapters import ServedAdapters, StagedAdapter
from rollmesh.generators.engines.request_validation import RequestLimits
from rollmesh.generators.engines.types import EngineSettings, SamplingParams, SleepLevel, SleepReport, WakeStep
from rollmesh.generators.engines.vllm import environment, fork_server, logs, private_names
from rollmesh.generators.engines.vllm.device_memory import DeviceMemory
from rollmesh.generators.engines.vllm.engine_args import engine_arguments, on_cpu, section_of, transfer_of, workers
from rollmesh.generators.engines.vllm.jobs import scoring
from rollmesh.generators.engines.vllm.jobs.output_stream import OutputRouter
from rollmesh.generators.engines.vllm.jobs.running_jobs import RunningJobs
from rollmesh.generators.engines.vllm.launcher import EngineProcess
from rollmesh.generators.engines.vllm.load_metrics import LoadMetricsCollector
from rollmesh.generators.engines.vllm.running_engine import SWAP_S, RunningEngine
from rollmesh.generators.engines.vllm.weight_loading import WeightLoading
from rollmesh.generators.engines.vllm.weight_senders import SharedSender, WeightSender
from rollmesh.mesh.liveness.freeze_detector import ProcessState
from rollmesh.mesh.model_config import read_config

log = logging.getLogger(__name__)


class VllmBackend(Backend):
    """vLLM.

    Args:
        folder: configuration and tokenizer files.
        model: as they describe it.
        settings: see there.
    """

    def __init__(self, folder: Path, model: ModelInfo, settings: EngineSettings) -> None:
        self._folder, self._model, self._settings = folder, model, settings
        self._section = section_of(settings)
        limits, experts = model.limits, model.experts
        self._arguments = engine_arguments(
            folder, settings, context=limits.context, tokenizer=limits.text, experts=experts
        )
        self._metrics = LoadMetricsCollector()
        self._adapters = ServedAdapters()
        self._process: EngineProcess | None = None
        self._sender: WeightSender | None = None
        self._jobs: RunningJobs | None = None
        self._weights: WeightLoading | None = None
        self._stopping = False

    # ----------------------------------------------------------------------------------------------- life

    async def start(self, on_death: Callable[[str], None]) -> RequestLimits:
        self._on_death = on_death
        environment.prepare(self._settings)
        environment.check_plugin()
        environment.check_build(self._settings, for_cpu=current_platform.is_cpu())
        self._sender = self._create_sender()
        config = await asyncio.to_thread(read_config, self._folder)
        dtype = getattr(torch, self._settings.dtype)
        checkpoint = await asyncio.to_thread(CheckpointLayout, config, dtype)
        # Each start has its own: one that began the numbers again would repeat responses. numpy is seeded with it.
        arguments = {"seed": secrets.randbits(31), **self._arguments}
        if not config.architectures:
            # Without a name vLLM takes the model for one that embeds.
            arguments.setdefault("hf_overrides", {"architectures": [checkpoint.architecture]})
        forks = fork_server.serves(self._settings)
        if forks:
            fork_server.use()
        log_file = logs.kept_log() if forks else logs.EngineLog()
        self._process = EngineProcess(
            arguments, self._metrics, self._section.start_timeout_s, log_file, killed=on_cpu(self._settings)
        )
        llm = await self._process.start()
        private_names.check_engine(llm)
        self._engine = RunningEngine(llm, self._on_engine_death)
        outputs = OutputRouter(llm.output_processor, self._metrics.preempted, self._engine.died)
        llm.output_processor = outputs
        self._memory = DeviceMemory(self._engine, on_cpu=on_cpu(self._settings))
        self._jobs = RunningJobs(
            self._engine, outputs, self._model, replicas=self._section.data_parallel, adapters=self._adapters
        )
        self._weights = WeightLoading(
            self._engine,
            self._settings,
            checkpoint=checkpoint,
            sender=self._sender,
            jobs=self._jobs,
            memory=self._memory,
            adapters=self._adapters,
            has_images=self._model.limits.images,
        )
        await self._engine.answer(self._sender.connect(llm))
        await self._warm_up()
        return RequestLimits(
            context=min(self._model.limits.context, llm.model_config.max_model_len),
            vocabulary=self._model.limits.vocabulary,
            eos=self._model.limits.eos,
            text=self._model.limits.text,
            images=self._model.limits.images,
        )

    async def stop(self) -> None:
        self._stopping = True
        if self._jobs is not None:
            self._jobs.fail(EngineError("vLLM is being stopped"))
        if self._sender is not None:
            self._sender.close()
        if self._process is not None:
            await self._process.stop()
        if self._weights is not None:
            self._weights.close()

    async def ping(self) -> None:
        # Each engine core answers between two steps, while its workers wait for it; its death comes another way.
        with suppress(EngineDeadError):
            await self._engine.answer(self._engine.llm.engine_core.call_utility_async("is_scheduler_paused"), SWAP_S)

    def process_state(self) -> ProcessState | None:
        return self._process.process_state() if self._process is not None else None

    def last_error(self) -> str:
        return self._process.last_error() if self._process is not None else ""

    def load_metrics(self) -> LoadMetrics:
        return self._metrics.current()

    def _create_sender(self) -> WeightSender:
        transfer = transfer_of(self._settings)
        if transfer == "shm":
            return SharedSender(workers(self._settings))
        # Never imported on a CPU.
        from rollmesh.generators.engines.vllm.native_transfer import native_sender

        return native_sender(transfer, torch.device(self._settings.device), workers(self._settings))

    async def _warm_up(self) -> None:
        """Runs the first forward passes, which are slow (kernels are chosen or compiled), before any request."""
        begin = time.monotonic()
        job = DecodeJob("warm-up", [0, 1], SamplingParams(max_tokens=2, temperature=1.0))
        await self._engine.answer(self.generate(job, lambda _: None), SWAP_S)
        await self._engine.answer(self._engine.llm.reset_prefix_cache())
        log.info("vLLM is warm after %.1f s", time.monotonic() - begin)

    def _on_engine_death(self) -> None:
        if not self._stopping and self._process is not None:
            self._on_death(self._process.cause())

    # ----------------------------------------------------------------------------------------------- jobs

    async def generate(self, job: DecodeJob, on_chunk: Callable[[DecodeChunk], None]) -> None:
        await self._started_jobs.run(job, on_chunk)

    async def abort(self, job_ids: Iterable[str]) -> None:
        await self._started_jobs.abort(job_ids)

    async def log_probs(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        return await scoring.log_probs(self._engine, token_ids, self._adapters.newest)

    @property
    def _started_jobs(self) -> RunningJobs:
        assert self._jobs is not None, "started"
        return self._jobs

    # ----------------------------------------------------------------------------------------------- pauses

    async def pause(self) -> None:
        # `AsyncLLM.pause_generation` does the same, and then sleeps for 20 ms.
        core = self._engine.llm.engine_core
        await self._engine.answer(core.pause_scheduler_async(mode="keep", clear_cache=False))
        # The outputs of the last step are here already, but may wait to be processed.
        while not core.outputs_queue.empty() and not self._engine.is_dead:  # noqa: ASYNC110 # a turn or two
            await asyncio.sleep(0)

    async def resume(self) -> None:
        await self._engine.answer(self._engine.llm.resume_generation())

    async def sleep(self, level: SleepLevel) -> SleepReport:
        return await self._memory.sleep(level, self._started_weights.forget)

    async def wake(self, step: WakeStep) -> None:
        if await self._memory.wake(step):
            # Awake, vLLM continues by itself.
            await self.pause()

    # ----------------------------------------------------------------------------------------------- weights

    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Any:
        return self._started_weights.stage(tensors)

    def stage_adapter(self, adapter: AdapterWeights) -> StagedAdapter:
        return self._started_weights.stage_adapter(adapter)

    def discard(self, staged: Any) -> None:
        self._started_weights.discard(staged)

    def interrupts(self, staged: Any, *, recompute: bool) -> bool:
        return isinstance(staged, StagedAdapter) and self._adapters.interrupts(staged, recompute=recompute)

    async def load(self, staged: Any, label: str, *, recompute: bool) -> None:
        await self._started_weights.load(staged, label, recompute=recompute)

    @property
    def _started_weights(self) -> WeightLoading:
        assert self._weights is not None, "started"
        return self._weights
