"""The interface of an external engine, of which `ExternalEngine` makes an `InferenceEngine`.

A backend is a thin adapter: it translates, and has no state of requests. `ExternalEngine` does the rest, alike for all
of them: pinned requests, prefixes, waiting for the first weights and the order of swaps. It also copies running
responses, and gives one result per request.

All coroutines run in the engine's own event loop, in its own thread. Each ends within a bounded time or raises
`EngineError`; a server that has died fails every call that waits for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from rollmesh.generators.engines.adapters import AdapterWeights
from rollmesh.generators.engines.request_validation import RequestLimits
from rollmesh.generators.engines.types import SamplingParams, SleepLevel, SleepReport, WakeStep
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.liveness.freeze_detector import ProcessState, ThreadState

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """A continuous stretch of decoding.

    Attributes:
        job_id: unique among the jobs of a backend, ever.
        token_ids: all tokens before the first one to be sampled; shorter than the context.
        sampling: `max_tokens` counts the tokens of this job alone; `stop` is looked for in them alone, by the backend.
        images: see `GenerationRequest`.
        seen: see `GenerationRequest`.
        prompt_tokens: how many of the tokens are the request's prompt, which the other members of its group share.
    """

    job_id: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    images: tuple[bytes, ...] = ()
    seen: str = ""
    prompt_tokens: int = 0


@dataclass(slots=True, eq=False)
class DecodeChunk:
    """Tokens of one job.

    Attributes:
        token_ids: new ones, in order; the end token and the tokens of a stop string included.
        log_probs: nats, one per token, as in `GenerationResult`.
        versions: runs over the tokens, (length, label given to `load`), as the engine itself stamped them.
        finish: why the job ended, with its last chunk; None before.
        routed_experts: with the last chunk, where asked for.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    versions: Sequence[tuple[int, str]]
    finish: Literal["stop", "length", "aborted"] | None = None
    routed_experts: NDArray[np.generic] | None = None


@dataclass(frozen=True, slots=True)
class LoadMetrics:
    """The engine's own view of its load.

    Attributes:
        running, waiting: jobs in its batch and in its queue.
        kv_usage: share of its KV cache in use; None where it does not say.
        preemptions: since the start.
    """

    running: int
    waiting: int
    kv_usage: float | None
    preemptions: int


class Backend(ABC):
    """A foreign engine."""

    @abstractmethod
    async def start(self, on_death: Callable[[str], None]) -> RequestLimits:
        """Loads the model without weights; takes seconds to minutes, with progress in the log.

        Args:
            on_death: to be called once, in the event loop, if the engine dies by itself; with the cause.

        Raises:
            EngineError: it did not come up; with the end of its log.
        """

    @abstractmethod
    async def generate(self, job: DecodeJob, on_chunk: Callable[[DecodeChunk], None]) -> None:
        """Runs a job to its end; `on_chunk` gets every chunk in the event loop, the last one with `finish`.

        Cancelling it aborts the job.

        Raises:
            PayloadError: the engine does not take this job, though its lengths and ids are within the limits (an image
                that cannot be read); others continue.
            RequestError: the engine failed at this job alone; others continue. Its chunks so far count, and it is given
                again as another job, `REQUEST_ATTEMPTS` times in all.
            EngineError: the engine cannot continue.
        """

    @abstractmethod
    async def abort(self, job_ids: Iterable[str]) -> None:
        """Ends jobs early, also while paused: their `generate` ends with `aborted`, soon. Unknown ids: passed over."""

    @abstractmethod
    async def pause(self) -> None:
        """Stops decoding between two steps; jobs stay. When it returns, every sampled token has reached `on_chunk`."""

    @abstractmethod
    async def resume(self) -> None:
        """Continues decoding."""

    @abstractmethod
    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Checks tensors and puts them where the engine's processes find them, while decoding continues.

        Called in a caller's thread, once `start` is done; that may be the event loop's own, so it must not wait for it.

        Returns:
            the argument of `load`; `discard` gives it back.

        Raises:
            WeightsError: a tensor is missing, unknown or of another shape, or there is no memory for it.
        """

    def stage_adapter(self, adapter: AdapterWeights) -> Any:  # noqa: ARG002 # most take none
        """Does the same for an adapter, with its base where the engine has not got it.

        Raises:
            WeightsError: as `stage`; or this engine computes with no adapters.
        """
        raise WeightsError("this engine computes with no adapters", hint="set learner.lora.push: merged")

    def interrupts(self, staged: Any, *, recompute: bool) -> bool:  # noqa: ARG002 # whole weights never do
        """True where no job can be running during `load`: they end before it, and continue after it as other jobs.

        Args:
            staged, recompute: as for `load`.
        """
        return False

    @abstractmethod
    async def load(self, staged: Any, label: str, *, recompute: bool) -> None:
        """Swaps the weights while paused; every token sampled afterwards bears `label`.

        Jobs that were running keep an adapter, and with it their label, to their end. The prefix cache of former
        weights is never used again. While asleep it takes back the memory of the weights alone (`wake` then takes the
        rest).

        Args:
            staged: from `stage`; this call gives it back, also where it fails.
            label: of the version: letters, digits and dots.
            recompute: the KV caches of running jobs are computed again too; else they are kept.

        Raises:
            WeightsError: the former weights are in service, whole.
            EngineError: the engine cannot continue.
        """

    @abstractmethod
    def discard(self, staged: Any) -> None:
        """Gives back staged weights that will not be loaded; any thread."""

    @abstractmethod
    async def log_probs(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Float32 [tokens - 1], nats, of each next token at temperature 1.

        Called while nothing is being swapped and the engine is not paused.

        Raises:
            EngineError: these tokens cannot be run; others continue.
        """

    @abstractmethod
    async def sleep(self, level: SleepLevel) -> SleepReport:
        """Gives memory back; called while paused, with no job running.

        Asleep it goes deeper: it takes nothing that others may have by now, but the weights where it cannot do without.
        """

    @abstractmethod
    async def wake(self, step: WakeStep) -> None:
        """Takes memory again, in one step or in two; stays paused."""

    @abstractmethod
    async def ping(self) -> None:
        """Returns when every process that decodes has answered; may be called at any time once `start` is done.

        Raises:
            EngineError: no answer came in its own time; that says nothing yet.
        """

    @abstractmethod
    def process_state(self) -> ProcessState | None:
        """Reads the state of its processes; any thread, also during `start`.

        None where there are none on this machine.
        """

    @abstractmethod
    def last_error(self) -> str:
        """The last error that one of its processes has raised; empty where that is not known. Quick."""

    @abstractmethod
    def load_metrics(self) -> LoadMetrics:
        """The newest load metrics known; any thread, never blocks."""

    @abstractmethod
    async def stop(self) -> None:
        """Ends it with all its processes. May be called twice, after its death, during `start` and without one."""


def state_of_start(state: ProcessState | None) -> ProcessState | None:
    """The state of processes that start, of which a stop alone counts: a start has a deadline of its own.

    It may rightly compute, or wait for a disk, for minutes without an answer.
    """
    if state is None or state.state in (ThreadState.STOPPED, ThreadState.TRACED):
        return state
    # As one that waits for a processor, which is counted nothing.
    return ProcessState(ThreadState.RUNNABLE, {})
