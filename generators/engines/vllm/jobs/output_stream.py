"""Turns the outputs of vLLM's engine core, after each step, into chunks of our jobs.

vLLM's own processing makes three objects per token and wakes a task per request and step. Here the core's outputs of
our jobs become chunks at once, in the task that receives them; other requests (probes) are processed by vLLM.

Invariant: a token's version is that of the adapter which its job keeps. Without one it is the version that the engine
core put on the step that sampled it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor, OutputProcessorOutput
from vllm.v1.metrics.stats import IterationStats

from rollmesh.generators.engines.errors import EngineError, RequestError
from rollmesh.generators.engines.external.backend import DecodeChunk
from rollmesh.mesh.errors import RollmeshError

_FINISH: dict[FinishReason, Literal["stop", "length", "aborted"]] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "aborted",
}


class JobStream:
    """A job in the engine core.

    Args:
        on_chunk: gets its chunks.
        adapter: label of the adapter that it keeps; None: its tokens bear the label of the engine's weights.

    Attributes:
        request_id: under which the core knows it; another one where it is submitted again.
        started: it has tokens.
        done: resolved when it has ended; fails as `Backend.generate` does.
    """

    def __init__(self, on_chunk: Callable[[DecodeChunk], None], adapter: str | None = None) -> None:
        self._adapter = adapter
        self.request_id = ""
        self.started = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._on_chunk = on_chunk
        self._text: IncrementalDetokenizer | None = None
        self._experts: list[NDArray[np.generic]] = []

    @property
    def waits(self) -> bool:
        """The core knows it and has given no token for it."""
        return bool(self.request_id) and not self.started

    def set_request(self, request: EngineCoreRequest, text: IncrementalDetokenizer | None) -> None:
        """Records the request that is on its way to the core; `text` finds its stop strings."""
        self.request_id, self._text = request.request_id, text

    def push(self, output: EngineCoreOutput, version: str) -> bool:
        """Delivers the tokens of a step; True where a stop string ended it before the core knows."""
        tokens, reason = output.new_token_ids, output.finish_reason
        if output.routed_experts is not None:
            self._experts.append(output.routed_experts)
        if reason is FinishReason.ERROR:
            # An error of this request alone: the core's own death comes through `OutputRouter.propagate_error`.
            self.fail(RequestError("vLLM failed at this request"))
            return False
        matched = False
        if self._text is not None and tokens:
            before = self._text.num_output_tokens()
            matched = bool(self._text.update(tokens, reason is FinishReason.STOP))
            if matched:
                # A step may have made more than one token, of which the last are after the match.
                tokens = tokens[: self._text.num_output_tokens() - before]
        finish = "stop" if matched else None if reason is None else _FINISH.get(reason, "length")
        count = len(tokens)
        self.started = self.started or count > 0
        rows = output.new_logprobs
        log_probs = [] if rows is None else rows.logprobs[:count, 0].tolist()
        label = version if self._adapter is None else self._adapter
        chunk = DecodeChunk(tokens, log_probs, ((count, label),) if count else ())
        if finish is not None:
            chunk.finish, chunk.routed_experts = finish, self._routed(count - len(output.new_token_ids))
        if count or finish is not None:
            self._on_chunk(chunk)
        if finish is not None:
            self.end()
        return matched and reason is None

    def aborted(self) -> None:
        """Delivers its last chunk, after an abort."""
        if not self.done.done():
            self._on_chunk(DecodeChunk((), (), (), "aborted", self._routed(0)))
            self.end()

    def end(self) -> None:
        """Ends it after its last chunk."""
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, error: RollmeshError) -> None:
        """Ends it with an error."""
        if not self.done.done():
            self.done.set_exception(error)

    def _routed(self, surplus: int) -> NDArray[np.generic] | None:
        if not self._experts:
            return None
        experts = np.concatenate(self._experts, axis=0)
        return experts[:surplus] if surplus < 0 else experts


class OutputRouter(OutputProcessor):
    """Replaces vLLM's output processor.

    Args:
        replaced: the one it replaces.
        on_preempted: called with the number of our jobs that have lost their KV cache.
        on_death: called when the engine core is gone.
    """

    def __init__(
        self, replaced: OutputProcessor, on_preempted: Callable[[int], None], on_death: Callable[[], None]
    ) -> None:
        super().__init__(replaced.tokenizer, log_stats=replaced.log_stats, stream_interval=replaced.stream_interval)
        self._streams: dict[str, JobStream] = {}
        self._on_preempted = on_preempted
        self._on_death = on_death

    def add(self, stream: JobStream) -> None:
        """Routes outputs under the stream's id to it, from here on."""
        self._streams[stream.request_id] = stream

    def forget(self, stream: JobStream) -> bool:
        """Drops outputs under the stream's id; False where it was unknown."""
        return self._streams.pop(stream.request_id, None) is not None

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: IterationStats | None = None,
        weight_version: str | None = None,
    ) -> OutputProcessorOutput:
        others: list[EngineCoreOutput] = []
        stopped: list[str] = []
        for output in engine_core_outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                others.append(output)
                continue
            if output.events:
                self._on_preempted(sum(event.type is EngineCoreEventType.PREEMPTED for event in output.events))
            if stream.push(output, weight_version or ""):
                stopped.append(output.request_id)
            if stream.done.done():
                del self._streams[output.request_id]
        if others:
            rest = super().process_outputs(others, engine_core_timestamp, iteration_stats, weight_version)
            stopped.extend(rest.reqs_to_abort)
        return OutputProcessorOutput(request_outputs=[], reqs_to_abort=stopped)

    def propagate_error(self, e: Exception) -> None:
        super().propagate_error(e)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineError(f"vLLM's engine has died: {e}"))
        self._on_death()
