"""The jobs that vLLM runs: submitted, submitted again where the weights change before they begin, and ended early.

Invariant: each job is salted with the label of the weights under which it is submitted. So no KV cache of previous
weights is ever found by a prefix (running jobs keep theirs where they may).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from vllm import PromptType
from vllm import SamplingParams as VllmSampling
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensPrompt
from vllm.inputs.engine import tokens_input
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.external.backend import DecodeChunk, DecodeJob
from rollmesh.generators.engines.external.model_info import ModelInfo
from rollmesh.generators.engines.external.served_adapters import LiveAdapter, ServedAdapters
from rollmesh.generators.engines.token_grammar import check_known
from rollmesh.generators.engines.vllm.jobs import sampling
from rollmesh.generators.engines.vllm.jobs.output_stream import JobStream, OutputRouter
from rollmesh.generators.engines.vllm.jobs.replica_routing import ReplicaRouter
from rollmesh.generators.engines.vllm.running_engine import RunningEngine
from rollmesh.generators.engines.vllm.weight_senders import request_of
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory.images import check_seen, open_images

_NO_WEIGHTS = "warm-up"


@dataclass(slots=True)
class _SubmittedRequest:
    """A job that has not ended, with the data to submit it again."""

    job: DecodeJob
    stream: JobStream
    parameters: VllmSampling
    replica: int
    adapter: LiveAdapter | None


class RunningJobs:
    """The jobs of one engine.

    Args:
        engine: that runs them.
        outputs: of its core.
        model: as its folder describes it.
        replicas: of the model (data parallelism).
        adapters: a new job takes the newest one.

    Attributes:
        label: of the weights in service; empty before the first ones.
    """

    def __init__(
        self,
        engine: RunningEngine,
        outputs: OutputRouter,
        model: ModelInfo,
        *,
        replicas: int,
        adapters: ServedAdapters,
    ) -> None:
        self._engine, self._outputs = engine, outputs
        self._model = model
        self._adapters = adapters
        self._replicas = ReplicaRouter(replicas)
        self._jobs: dict[str, _SubmittedRequest] = {}
        self._known: asyncio.Future[None] | None = None
        self.label = ""

    async def run(self, job: DecodeJob, on_chunk: Callable[[DecodeChunk], None]) -> None:
        """See `Backend.generate`."""
        adapter = self._adapters.newest
        stream = JobStream(on_chunk, adapter.label if adapter is not None else None)
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
            await self._forget([running])
            raise
        finally:
            stream.end()
            self._adapters.end_job(adapter)
            self._replicas.release(prompt)
            del self._jobs[job.job_id]
            self._outputs.forget(stream)

    async def abort(self, job_ids: Iterable[str]) -> None:
        """See `Backend.abort`."""
        known = [running for name in job_ids if (running := self._jobs.get(name)) is not None]
        await self._forget(known)
        for running in known:
            running.stream.aborted()

    async def submit_again(self) -> None:
        """Submits the jobs that vLLM has not begun once more, after the weights have changed.

        They would find prefixes of previous weights, and lack image features during their prefill. Jobs whose images
        are being read are left out: vLLM does not know them yet, and `_read_images` sees the new weights.
        """
        waiting = [running for running in self._jobs.values() if running.stream.waits]
        await self._forget(waiting)
        for running in waiting:
            try:
                await self._engine.answer(self._submit(running))
            except PayloadError as error:
                running.stream.fail(error)

    def fail(self, error: EngineError) -> None:
        """Ends all jobs with an error."""
        for running in tuple(self._jobs.values()):
            running.stream.fail(error)

    async def _submit(self, running: _SubmittedRequest) -> None:
        """Sends a job to the engine core, under a name of its own; does nothing where it has ended meanwhile.

        Raises:
            PayloadError: vLLM does not take it.
            EngineError: it has died.
        """
        llm, job = self._engine.llm, running.job
        if job.sampling.grammar:
            await self._check_tokenizer()
        processor = llm.input_processor
        try:
            if job.images:
                request = await self._read_images(running)
                _check_widened(job, request.prompt_token_ids or ())
            else:
                rendered = tokens_input(list(job.token_ids), cache_salt=self.label or _NO_WEIGHTS)
                request = processor.process_inputs(
                    job.job_id,
                    rendered,
                    running.parameters,
                    supported_tasks=("generate",),
                    lora_request=lora_request(running.adapter),
                )
        except (ValueError, TypeError, OSError, VLLMClientError) as error:
            raise PayloadError("request", f"vLLM does not take it: {error}") from error
        if running.stream.done.done():
            # It was ended while the core knew nothing of it, and is not ended there again.
            return
        processor.assign_request_id(request)
        request.data_parallel_rank = running.replica
        text = IncrementalDetokenizer.from_new_request(llm.tokenizer, request) if job.sampling.stop else None
        running.stream.set_request(request, text)
        self._outputs.add(running.stream)
        llm._run_output_handler()
        self._engine.check_alive()
        await llm.engine_core.add_request_async(request)

    async def _check_tokenizer(self) -> None:
        """Checks once, for all jobs that wait for it, whether llguidance knows the tokenizer: that takes seconds."""
        if self._known is None:
            assert self._model.tokenizer is not None, "checked when it was submitted"
            self._known = asyncio.ensure_future(asyncio.to_thread(check_known, self._model.tokenizer))
        await asyncio.shield(self._known)

    async def _read_images(self, running: _SubmittedRequest) -> EngineCoreRequest:
        """The request for a job with images, under the weights that are in service at its end."""
        while True:
            label = self.label
            request = await self._engine.llm.input_processor.process_inputs_async(
                running.job.job_id,
                self._with_images(running.job),
                running.parameters,
                supported_tasks=("generate",),
                lora_request=lora_request(running.adapter),
            )
            if label == self.label:
                return request

    def _with_images(self, job: DecodeJob) -> PromptType:
        """The prompt with its images; vLLM adds their tokens."""
        prompt = TokensPrompt(prompt_token_ids=list(job.token_ids), cache_salt=self.label or _NO_WEIGHTS)
        prompt["multi_modal_data"] = {"image": open_images(job.images)}
        return prompt

    async def _forget(self, dropped: Sequence[_SubmittedRequest]) -> None:
        """Makes the engine core forget jobs."""
        ids = [running.stream.request_id for running in dropped if self._outputs.forget(running.stream)]
        if ids and not self._engine.is_dead:
            await self._engine.answer(self._engine.llm.engine_core.abort_requests_async(ids))


def lora_request(adapter: LiveAdapter | None) -> LoRARequest | None:
    """vLLM's name of an adapter, if there is one."""
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
