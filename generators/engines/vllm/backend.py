"""vLLM as a backend: jobs, pauses, swaps of weights, sleep.

Invariants: each job is salted with the label of the weights under which it starts. So no KV cache of former weights is
ever found by a prefix (running jobs keep theirs where they may). The cause of vLLM's death is reported once, and every
call that waits for it fails.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from vllm import PromptType
from vllm import SamplingParams as VllmSampling
from vllm.exceptions import VLLMClientError, VLLMError
from vllm.inputs import TokensPrompt
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.exceptions import EngineDeadError

from rollmesh.generators.engines.adapters import AdapterWeights
from rollmesh.generators.engines.checkpoint_names import CheckpointLayout
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.external.adapter_folders import AdapterFolders
from rollmesh.generators.engines.external.backend import Backend, DecodeChunk, DecodeJob, LoadMetrics
from rollmesh.generators.engines.external.model_info import ModelInfo
from rollmesh.generators.engines.external.served_adapters import LiveAdapter, ServedAdapters, StagedAdapter
from rollmesh.generators.engines.request_validation import RequestLimits
from rollmesh.generators.engines.token_grammar import check_known
from rollmesh.generators.engines.types import EngineSettings, SamplingParams, SleepLevel, SleepReport, WakeStep
from rollmesh.generators.engines.vllm import environment, fork_server, logs, private_names, sampling
from rollmesh.generators.engines.vllm.engine_args import engine_arguments, on_cpu, section_of, transfer_of, workers
from rollmesh.generators.engines.vllm.launcher import EngineProcess
from rollmesh.generators.engines.vllm.load_metrics import LoadMetricsCollector
from rollmesh.generators.engines.vllm.output_stream import JobStream, OutputRouter
from rollmesh.generators.engines.vllm.replica_routing import ReplicaRouter
from rollmesh.generators.engines.vllm.shared_weights import SharedWeights
from rollmesh.generators.engines.vllm.weight_senders import (
    SharedSender,
    WeightSender,
    load_adapter,
    request_of,
)
from rollmesh.generators.engines.vllm.worker import HELD_BYTES, PLAIN_BYTES
from rollmesh.mesh.errors import PayloadError, WeightsError
from rollmesh.mesh.liveness.freeze_detector import ProcessState
from rollmesh.mesh.model_config import read_config
from rollmesh.mesh.trajectory.images import check_seen, open_images

log = logging.getLogger(__name__)
T = TypeVar("T")
# A decode step, or a swap, ends within this; one that hangs is found before (`engine_watch`).
_STEP_S = 600.0
_SWAP_S = 900.0
_WARM_UP = "warm-up"


@dataclass(slots=True)
class _SubmittedRequest:
    """A job that has not ended, with the data to submit it again."""

    job: DecodeJob
    stream: JobStream
    parameters: VllmSampling
    replica: int
    adapter: LiveAdapter | None


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
        self._replicas = ReplicaRouter(self._section.data_parallel)
        self._process: EngineProcess | None = None
        self._checkpoint: CheckpointLayout | None = None
        self._sender: WeightSender | None = None
        self._jobs: dict[str, _SubmittedRequest] = {}
        self._knows_tokenizer = False
        self._label = ""
        self._adapters = ServedAdapters()
        self._folders = AdapterFolders()
        self._asleep: set[str] = set()
        self._stopping = False

    # ----------------------------------------------------------------------------------------------- life

    async def start(self, on_death: Callable[[str], None]) -> RequestLimits:
        self._on_death = on_death
        self._dead: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        environment.prepare(self._settings)
        environment.check_plugin()
        environment.check_build(self._settings, for_cpu=current_platform.is_cpu())
        self._sender = self._create_sender()
        config = await asyncio.to_thread(read_config, self._folder)
        dtype = getattr(torch, self._settings.dtype)
        self._checkpoint = await asyncio.to_thread(CheckpointLayout, config, dtype)
        arguments = dict(self._arguments)
        if not config.architectures:
            # Without a name vLLM takes the model for one that embeds.
            arguments.setdefault("hf_overrides", {"architectures": [self._checkpoint.architecture]})
        forks = fork_server.serves(self._settings)
        if forks:
            fork_server.use()
        log_file = logs.kept_log() if forks else logs.EngineLog()
        self._process = EngineProcess(
            arguments, self._metrics, self._section.start_timeout_s, log_file, killed=on_cpu(self._settings)
        )
        self._engine: AsyncLLM = await self._process.start()
        private_names.check_engine(self._engine)
        self._outputs = OutputRouter(self._engine.output_processor, self._metrics.preempted, self._on_engine_death)
        self._engine.output_processor = self._outputs
        await self._answer(self._sender.connect(self._engine), _STEP_S)
        await self._warm_up()
        return RequestLimits(
            context=min(self._model.limits.context, self._engine.model_config.max_model_len),
            vocabulary=self._model.limits.vocabulary,
            eos=self._model.limits.eos,
            text=self._model.limits.text,
            images=self._model.limits.images,
        )

    async def stop(self) -> None:
        self._stopping = True
        for running in tuple(self._jobs.values()):
            running.stream.fail(EngineError("vLLM is being stopped"))
        if self._sender is not None:
            self._sender.close()
        if self._process is not None:
            await self._process.stop()
        self._folders.close()

    async def ping(self) -> None:
        # Each engine core answers between two steps, while its workers wait for it; its death comes another way.
        with suppress(EngineDeadError):
            await self._answer(self._engine.engine_core.call_utility_async("is_scheduler_paused"), _SWAP_S)

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
        job = DecodeJob(_WARM_UP, [0, 1], SamplingParams(max_tokens=2, temperature=1.0))
        await self._answer(self.generate(job, lambda _: None), _SWAP_S)
        await self._answer(self._engine.reset_prefix_cache(), _STEP_S)
        log.info("vLLM is warm after %.1f s", time.monotonic() - begin)

    def _on_engine_death(self) -> None:
        if self._dead.done():
            return
        self._dead.set_result(None)
        if not self._stopping and self._process is not None:
            self._on_death(self._process.cause())

    async def _answer(self, call: Awaitable[T], deadline_s: float) -> T:
        """Awaits vLLM's answer to a call; it leaves calls unanswered when it dies.

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
        if self._dead.done():
            raise EngineError("vLLM's engine has died")
        raise EngineError(f"vLLM has not answered for {deadline_s:.0f} s", hint="see its log")

    # ----------------------------------------------------------------------------------------------- jobs

    async def generate(self, job: DecodeJob, on_chunk: Callable[[DecodeChunk], None]) -> None:
        adapter = self._adapters.newest
        stream = JobStream(on_chunk, adapter.label if adapter is not None else None)
        if job.sampling.grammar and not self._knows_tokenizer:
            assert self._model.tokenizer is not None, "checked when it was submitted"
            await asyncio.to_thread(check_known, self._model.tokenizer)
            self._knows_tokenizer = True
        try:
            parameters = sampling.to_vllm(job.sampling, self._model.limits.eos)
        except (ValueError, VLLMClientError) as error:
            raise PayloadError("sampling", f"vLLM does not take it: {error}") from error
        prompt = tuple(job.token_ids[: job.prompt_tokens])
        self._adapters.begin_job()
        running = _SubmittedRequest(job, stream, parameters, self._replicas.assign(prompt), adapter)
        self._jobs[job.job_id] = running
        try:
            await self._submit(running)
            await stream.done
        except asyncio.CancelledError:
            await self._forget_jobs([running])
            raise
        finally:
            stream.end()
            self._adapters.end_job(adapter)
            self._replicas.release(prompt)
            del self._jobs[job.job_id]
            self._outputs.forget(stream)

    async def abort(self, job_ids: Iterable[str]) -> None:
        known = [running for name in job_ids if (running := self._jobs.get(name)) is not None]
        await self._forget_jobs(known)
        for running in known:
            running.stream.aborted()

    async def _submit(self, running: _SubmittedRequest) -> None:
        """Sends a job to the engine core, under a name of its own; does nothing where it has ended meanwhile.

        Raises:
            PayloadError: vLLM does not take it.
            EngineError: it has died.
        """
        engine, job = self._engine, running.job
        processor = engine.input_processor
        try:
            if job.images:
                request = await self._read_images(running)
                _check_widened(job, request.prompt_token_ids or ())
            else:
                rendered = tokens_input(list(job.token_ids), cache_salt=self._label or _WARM_UP)
                request = processor.process_inputs(
                    job.job_id,
                    rendered,
                    running.parameters,
                    supported_tasks=("generate",),
                    lora_request=_lora_request(running.adapter),
                )
        except (ValueError, TypeError, OSError, VLLMClientError) as error:
            raise PayloadError("request", f"vLLM does not take it: {error}") from error
        if running.stream.done.done():
            # It was ended while the core knew nothing of it, and is not ended there again.
            return
        processor.assign_request_id(request)
        request.data_parallel_rank = running.replica
        text = IncrementalDetokenizer.from_new_request(engine.tokenizer, request) if job.sampling.stop else None
        running.stream.set_request(request, text)
        self._outputs.add(running.stream)
        engine._run_output_handler()
        if self._dead.done():
            raise EngineError("vLLM's engine has died")
        await engine.engine_core.add_request_async(request)

    async def _read_images(self, running: _SubmittedRequest) -> EngineCoreRequest:
        """The request for a job with images, under the weights that are in service at its end."""
        while True:
            label = self._label
            request = await self._engine.input_processor.process_inputs_async(
                running.job.job_id,
                self._with_images(running.job),
                running.parameters,
                supported_tasks=("generate",),
                lora_request=_lora_request(running.adapter),
            )
            if label == self._label:
                return request

    def _with_images(self, job: DecodeJob) -> PromptType:
        """The prompt with its images; vLLM adds their tokens."""
        prompt = TokensPrompt(prompt_token_ids=list(job.token_ids), cache_salt=self._label or _WARM_UP)
        prompt["multi_modal_data"] = {"image": open_images(job.images)}
        return prompt

    async def _forget_jobs(self, dropped: Sequence[_SubmittedRequest]) -> None:
        """Makes the engine core forget jobs."""
        ids = [running.stream.request_id for running in dropped if self._outputs.forget(running.stream)]
        if ids and not self._dead.done():
            await self._answer(self._engine.engine_core.abort_requests_async(ids), _STEP_S)

    # ----------------------------------------------------------------------------------------------- pauses

    async def pause(self) -> None:
        # `AsyncLLM.pause_generation` does the same, and then sleeps for 20 ms.
        core = self._engine.engine_core
        await self._answer(core.pause_scheduler_async(mode="keep", clear_cache=False), _STEP_S)
        # The outputs of the last step are here already, but may wait to be processed.
        while not core.outputs_queue.empty() and not self._dead.done():  # noqa: ASYNC110 # a turn or two
            await asyncio.sleep(0)

    async def resume(self) -> None:
        await self._answer(self._engine.resume_generation(), _STEP_S)

    # ----------------------------------------------------------------------------------------------- weights

    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Any:
        assert self._checkpoint is not None and self._sender is not None, "started"  # noqa: PT018
        arranged = self._checkpoint.to_checkpoint(tensors)
        return self._sender.stage(arranged)

    def stage_adapter(self, adapter: AdapterWeights) -> StagedAdapter:
        return self._adapters.stage(adapter, form=self._folders.write, stage_base=self.stage)

    def discard(self, staged: Any) -> None:
        assert self._sender is not None, "it was staged with it"
        if isinstance(staged, StagedAdapter):
            staged.form.discard()
            staged = staged.base
        if staged is not None:
            self._sender.discard(staged)

    def interrupts(self, staged: Any, *, recompute: bool) -> bool:
        if not isinstance(staged, StagedAdapter):
            return False
        return self._adapters.interrupts(staged, recompute=recompute)

    async def load(self, staged: Any, label: str, *, recompute: bool) -> None:
        if isinstance(staged, StagedAdapter):
            await self._load_adapter(staged, label)
        else:
            await self._load_whole(staged, label, recompute=recompute)

    async def _load_adapter(self, staged: StagedAdapter, label: str) -> None:
        adapters = self._adapters
        await adapters.install(
            staged,
            label,
            stage_base=self.stage,
            load_base=lambda base: self._load_whole(base, label, recompute=True),
            load=lambda adapter: load_adapter(
                self._engine, adapters, adapter, lambda call: self._answer(call, _STEP_S)
            ),
        )
        self._label = label

    async def _load_whole(self, staged: Any, label: str, *, recompute: bool) -> None:
        assert self._sender is not None, "it was staged with it"
        try:
            if "weights" in self._asleep:
                await self._answer(self._engine.engine_core.wake_up_async(["weights"]), _STEP_S)
                self._asleep.discard("weights")
            await self._answer(self._sender.send(staged, label), _SWAP_S)
            if on_cpu(self._settings) and not self._label:
                await self._log_copies(staged)
            self._label = label
            await self._reset_caches(recompute=recompute)
        except (WeightsError, EngineError):
            raise
        except Exception as error:  # vLLM raises errors of its workers as they come
            raise EngineError(f"vLLM could not load weights, and has none now: {error}", hint="see its log") from error
        finally:
            self._sender.discard(staged)

    async def _reset_caches(self, *, recompute: bool) -> None:
        """Resets caches: no prefix finds a KV cache of former weights, and no image their features."""
        if self._model.limits.images:
            await self._answer(self._engine.reset_encoder_cache(), _STEP_S)
        if not (self._section.prefix_caching or self._model.limits.images or recompute):
            return
        # The blocks of running jobs stay, under the salt of former weights.
        await self._answer(self._engine.reset_prefix_cache(reset_running_requests=recompute), _STEP_S)
        if recompute:
            return
        # Jobs that vLLM has not begun would find them, and lack image features amid their prefill. It does not know
        # those yet whose images are being read: they are submitted once, and not here too.
        waiting = [running for running in self._jobs.values() if running.stream.waits]
        await self._forget_jobs(waiting)
        for running in waiting:
            try:
                await self._answer(self._submit(running), _STEP_S)
            except PayloadError as error:
                running.stream.fail(error)

    async def log_probs(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        name = f"probe-{time.monotonic_ns()}"
        ids = list(token_ids)
        # A prompt that fills the context leaves no room for the token that vLLM has to sample.
        full = len(ids) == self._engine.model_config.max_model_len
        parameters = sampling.scoring(ids[-1] if full else None)
        rendered = tokens_input(ids[:-1] if full else ids)

        async def run() -> list[float]:
            lora = _lora_request(self._adapters.newest)
            async for output in self._engine.generate(rendered, parameters, name, lora_request=lora):
                scored = output.prompt_logprobs or []
                # No entry for the first token, and the given token's own in every other.
                rows = [row[token].logprob for row, token in zip(scored[1:], ids[1:], strict=False) if row]
                last = output.outputs[0].logprobs
                return [*rows, last[0][ids[-1]].logprob] if full and last else rows
            return []

        try:
            log_probs = await self._answer(run(), _STEP_S)
        except (ValueError, TypeError, VLLMError) as error:
            raise EngineError(f"vLLM does not score these tokens: {error}") from error
        if len(log_probs) != len(ids) - 1:
            raise EngineError(f"vLLM scored {len(log_probs)} of {len(ids) - 1} tokens")
        return np.asarray(log_probs, np.float32)

    # ----------------------------------------------------------------------------------------------- sleep

    async def sleep(self, level: SleepLevel) -> SleepReport:
        begin = time.perf_counter()
        if on_cpu(self._settings):
            # vLLM's CPU worker ignores it: weights and KV cache stay where they are.
            return SleepReport(0, time.perf_counter() - begin)
        if "weights" in self._asleep:
            # Else vLLM keeps the host's copy. The KV cache stays away: it passes over what is asleep.
            await self.wake(WakeStep.WEIGHTS)
        before = await self._held_bytes()
        drops = level >= SleepLevel.WITHOUT_WEIGHTS
        await self._answer(self._engine.sleep(level=2 if drops else 1, mode="keep"), _SWAP_S)
        if drops and self._sender is not None:
            self._sender.forget()
            await self._forget_adapters()
        self._asleep = {"weights", "kv_cache"}
        return SleepReport(before - await self._held_bytes(), time.perf_counter() - begin)

    async def _forget_adapters(self) -> None:
        """Gives all adapters up: their memory is gone with that of the weights, and no job runs."""
        for adapter in self._adapters.take_all():
            await self._answer(self._engine.remove_lora(adapter.number), _STEP_S)

    async def _held_bytes(self) -> int:
        """Bytes that all workers hold of their devices and give back asleep."""
        return await self._sum_over_workers(HELD_BYTES)

    async def _sum_over_workers(self, method: str) -> int:
        core = self._engine.engine_core
        replies = core.call_utility_all_async("collective_rpc", method, None, (), None)
        return sum(sum(workers) for workers in await self._answer(replies, _STEP_S))

    async def _log_copies(self, staged: SharedWeights) -> None:
        """Logs which copies of the weights there are: the learner's file cannot serve where kernels pack them."""
        plain = await self._sum_over_workers(PLAIN_BYTES)
        item = getattr(torch, self._settings.dtype).itemsize
        whole = sum(math.prod(shape) for shape in staged.layout.shapes) * item
        log.info(
            "weights come through %s; vLLM has %d MiB of them as they are, and its kernels keep a packed copy of the "
            "linear layers, %d MiB",
            staged.origin,
            plain >> 20,
            max(0, whole - plain) >> 20,
        )

    async def wake(self, step: WakeStep) -> None:
        parts = self._asleep if step >= WakeStep.KV_CACHE else self._asleep & {"weights"}
        if not parts:
            return
        await self._answer(self._engine.engine_core.wake_up_async(sorted(parts)), _SWAP_S)
        self._asleep = self._asleep - parts
        if not self._asleep:
            # Awake, vLLM continues by itself.
            await self.pause()


def _lora_request(adapter: LiveAdapter | None) -> LoRARequest | None:
    return None if adapter is None else request_of(adapter)


def _check_widened(job: DecodeJob, token_ids: Sequence[int]) -> None:
    """Refuses a job whose images vLLM has widened in another way than the learner does.

    Args:
        job: with images.
        token_ids: of the job as vLLM sees it.

    Raises:
        PayloadError: they differ.
    """
    sampled = len(job.token_ids) - job.prompt_tokens
    check_seen(token_ids[: len(token_ids) - sampled], job.seen)
