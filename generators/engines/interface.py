"""The interface of inference engines.

Invariants every engine keeps (the contract suite in `tests/generators/engines/contract.py` checks them):

- Every accepted request ends in exactly one `GenerationResult`, delivered through `on_results`; or else the engine
  has failed as a whole and said so through `on_failure`.
- The events of a streamed request, concatenated, are its result, and come before it.
- A sampled token carries the version of the weights whose forward pass produced its logits.
- Tokens that a request brings with it (`prefix`) stand in its result as they came, and are never sampled again.
- Weights change between two decode steps only, all tensors at once, and never while a pinned request is running.
  A swap that fails, wherever it fails, leaves the former weights in service, whole.
- A bad request or a bad set of weights is refused by a typed error and changes nothing.
- A request at which the engine itself fails is tried twice, then ends alone, refused; no other request is disturbed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.liveness.freeze_detector import ProcessState
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.versions import PolicyVersion

if TYPE_CHECKING:
    import torch

    from rollmesh.mesh.config.rollout import HfSection, SglangSection, VllmSection

FinishReason = Literal["stop", "length", "aborted"]
# The treatment of running sequences at a swap. `keep`: they continue with the keys and values that older weights made.
# `recompute`: all are prefilled again, together, before the next step. `interrupt`: all are stopped and put back at the
# head of the queue, in the order in which they started. They continue as requests with their tokens as prefix. Each
# step prefills a bounded number of these tokens, while the sequences that are ready decode.
KvPolicy = Literal["keep", "recompute", "interrupt"]
EngineState = Literal["running", "paused", "asleep"]


class EngineError(RollmeshError):
    """The inference engine cannot continue, or has been stopped.

    Attributes:
        culprit: id of the request that was tried alone (`GenerationRequest.alone`) when it ended; empty where none was.
        raised: what its processes raised last, then.
    """

    code = "engine"
    exit_code = 10
    culprit: str = ""
    raised: str = ""


class RequestError(RollmeshError):
    """The engine failed at one request and lives; the request may succeed another time."""

    code = "request"
    exit_code = 10


# Failures of an engine at a request before it refuses it.
REQUEST_ATTEMPTS = 2


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request.

    Attributes:
        temperature: softmax temperature: 0 (greedy), or 0.01 and above.
        top_p: nucleus mass in (0, 1]; 1 is off.
        top_k: number of most likely tokens kept; 0 is off. Applied before `top_p`.
        max_tokens: upper bound of response tokens, the end token included.
        stop: strings that end the response; the text up to and including the match is kept.
        seed: seed of the draws; 0 lets the engine choose. Requests with the same prompt and seed draw alike, so
            that the members of a group need different seeds. After a prefix, draws never repeat those of the
            response's first tokens; whether they are those of an uninterrupted response is left to the engine.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to be sampled.

    Attributes:
        request_id: unique among the requests in flight.
        prompt_ids: token ids, at least one. Requests of one `submit` with equal prompts and images share the prefill.
        sampling: see `SamplingParams`.
        pinned: finish under the weights that are served when it is submitted. While one is queued or running no swap
            happens, and while a swap waits only pinned requests start. Meant for finite sets, such as an evaluation.
        prefix: tokens of the response that are sampled already, here or elsewhere, under whatever versions: the engine
            continues after them, and its result begins with them. `sampling` holds for the whole response: its
            `max_tokens` counts them and `stop` is looked for in them. Where they are complete (end token, stop
            string, budget or context used up) the result comes at once. A pinned request takes none.
        stream: `on_tokens` gets its tokens as they are sampled (not those of `prefix`).
        alone: an earlier holder lost it unfinished, perhaps because an engine ended at it. In an engine with processes
            of its own nothing else starts before it has its first token; an engine that ends then names it.
        images: encoded files (PNG, JPEG), in the order of their placeholders in `prompt_ids`, one placeholder token
            each: the engine widens it to the tokens that its processor makes of the image. These count in the
            context. They are read after `submit`, while others decode. A request whose images cannot be read, or which
            is too long then, is refused (`refusal`).
        earlier: tokens at the end of `prompt_ids` that came in earlier turns: a placeholder that was sampled there is a
            token like any other.
        outside: requested from outside of the run: its tokens belong to no group.
    """

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    pinned: bool = False
    prefix: Trajectory | None = None
    stream: bool = False
    alone: bool = False
    images: tuple[bytes, ...] = ()
    earlier: int = 0
    outside: bool = False

    def response_mask(self, tokens: int) -> NDArray[np.uint8]:
        """The mask of the first `tokens` tokens of the response: the prefix's, then 1 for each sampled token."""
        mask = np.ones(tokens, np.uint8)
        if self.prefix is not None:
            mask[: len(self.prefix)] = self.prefix.response_mask
        return mask


@dataclass(frozen=True, slots=True, eq=False)
class GenerationResult:
    """One sampled response.

    Attributes:
        request_id: of the request.
        sampled: its tokens, those of the request's `prefix` included; none where it was aborted before its first.
        finish_reason: `stop` (end token or stop string), `length` (max_tokens or the model's context), `aborted`.
        side: large arrays that belong to the response: `routed_experts`, uint8 or int16
            [prompt + T - 1, layers, experts per token].
        refusal: why the engine does not answer this request, found only when the request started. It cannot read an
            image, has no room for it, or has failed at it `REQUEST_ATTEMPTS` times. Another try ends alike.
            `finish_reason` is `aborted` then. Empty where it was answered, or ended early.
    """

    request_id: str
    sampled: Trajectory
    finish_reason: FinishReason
    side: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)
    refusal: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class TokenEvent:
    """New tokens of a streamed response, of one or more decode steps.

    Attributes:
        request_id: of the request.
        sampled: the new tokens alone, at least one.
    """

    request_id: str
    sampled: Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class PartialResponse:
    """The tokens so far of a response that is being sampled.

    Attributes:
        request_id: of the request.
        sampled: its tokens so far, the request's `prefix` included; a copy.
        running_s: seconds since the engine took it up.
    """

    request_id: str
    sampled: Trajectory
    running_s: float


@dataclass(frozen=True, slots=True)
class SwapTimings:
    """Timings of one swap of weights, in microseconds.

    Attributes:
        version: now served.
        digest: of the manifest, as given to `update_weights`.
        stage_us: checking the tensors and copying those that cannot serve as they are, while decoding continues.
        wait_us: from then to the start of the swap (a decode step, or pinned requests, to finish).
        pause_us: for which decoding stood still; includes `recompute_us`.
        recompute_us: re-prefilling running sequences (KV policy `recompute`) while nothing is decoded; 0 where that
            is done among the steps that follow.
        in_flight: sequences that continue under the new weights.
    """

    version: PolicyVersion
    digest: str
    stage_us: float
    wait_us: float
    pause_us: float
    recompute_us: float
    in_flight: int


@dataclass(frozen=True, slots=True, eq=False)
class ProbeResult:
    """Log-probs of given tokens, and the weights that gave them.

    Attributes:
        version, digest: of the weights in service, as given to `update_weights`.
        log_probs: float32 [tokens - 1], nats, of each next token at temperature 1.
        tensors: the weights as they are in the engine, by Hugging Face name; they stay so whatever is swapped in later.
            None where the engine keeps them in another form.
    """

    version: PolicyVersion
    digest: str
    log_probs: NDArray[np.float32]
    tensors: Mapping[str, torch.Tensor] | None


@dataclass(frozen=True, slots=True)
class SleepReport:
    """Memory that `sleep` gave back.

    Attributes:
        freed_bytes: of the engine's device as far as it can tell; 0 where it frees nothing (SGLang on a CPU).
        seconds: it took.
    """

    freed_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot.

    Attributes:
        active: sequences being decoded.
        queued: requests waiting for a slot (or for the first weights).
        tokens_generated: sampled tokens since the start.
        swaps: weight updates done.
        serving: version of the weights; None before the first, and while they are dropped (`sleep`).
        digest: manifest digest of the weights; empty where there are none.
        failure: what ended the engine; None while it lives.
        state: running (also while it waits for its first weights), paused or asleep.
        kv_usage: share of the KV cache that is in use, 0 to 1; None where the engine has no such bound.
        preemptions: sequences that lost their KV cache for want of room, since the start.
        tokens_outside: of `tokens_generated`, those of requests from outside of the run.
    """

    active: int
    queued: int
    tokens_generated: int
    swaps: int
    serving: PolicyVersion | None
    digest: str
    failure: str | None
    state: EngineState = "running"
    kv_usage: float | None = None
    preemptions: int = 0
    tokens_outside: int = 0

    @property
    def tokens_for_groups(self) -> int:
        """Sampled since the start for members of groups."""
        return self.tokens_generated - self.tokens_outside


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings with which an engine is built.

    Attributes:
        slots: sequences decoded together.
        dtype: float32, bfloat16 or float16.
        context: tokens of the longest sequence that will be asked for; None: what the model can.
        kv: what becomes of running sequences' KV cache at a swap.
        device: torch device.
        sharing: processes of the run that share the device's memory, this one included.
        seed: of the draws of requests that bring none.
        threads: compute threads on a CPU, all worker processes together.
        allow_insecure: it may talk unprotected to other machines.
        hf, vllm, sglang: settings of these engines; None: their defaults.
    """

    slots: int = 64
    dtype: str = "float32"
    context: int | None = None
    kv: KvPolicy = "keep"
    device: str = "cpu"
    sharing: int = 1
    seed: int = 0
    threads: int = 1
    allow_insecure: bool = False
    hf: HfSection | None = None
    vllm: VllmSection | None = None
    sglang: SglangSection | None = None


class EngineListener(Protocol):
    """Receives what an engine produces.

    Called from the engine's own thread: the methods must be quick, must not raise, and must not wait for the engine.
    """

    def on_results(self, results: list[GenerationResult]) -> None:
        """Requests that have ended."""
        ...

    def on_tokens(self, events: list[TokenEvent]) -> None:
        """New tokens of streamed requests since the last call."""
        ...

    def on_failure(self, error: EngineError) -> None:
        """The engine has failed as a whole; nothing follows."""
        ...


class InferenceEngine(ABC):
    """Continuous batching over one copy of the model. All methods may be called from any thread."""

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def from_folder(cls, folder: Path, settings: EngineSettings, listener: EngineListener) -> InferenceEngine:
        """See `generators.engines.create_engine`."""

    @abstractmethod
    def start(self) -> None:
        """Starts the engine's thread. Requests wait until the first weights have arrived."""

    @abstractmethod
    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queues requests, all or none.

        Raises:
            PayloadError: a request is malformed or longer than the model's context; names the field and the limit.
            EngineError: the engine is not running.
        """

    @abstractmethod
    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests early; each still gets its result (`aborted`, with the tokens so far). Unknown ids: ignored."""

    @abstractmethod
    def progress(self, at_least: Mapping[str, int]) -> Future[list[PartialResponse]]:
        """Copies the tokens of running responses, between two decode steps.

        It costs nothing until it is called, and then only the copies.

        Args:
            at_least: request id -> tokens below which its response is left out.

        Returns:
            A future of the responses that are running and have that many tokens, in no order. Ids that are unknown,
            finished or waiting for their first slot are left out. It fails with EngineError where the engine does.

        Raises:
            EngineError: the engine is not running.
        """

    @abstractmethod
    def update_weights(
        self, version: PolicyVersion, tensors: Iterable[tuple[str, torch.Tensor]] | None, digest: str
    ) -> Future[SwapTimings]:
        """Swaps the weights between two decode steps.

        The call itself checks the tensors, and copies those whose dtype or device is not the engine's. Decoding
        continues meanwhile. The call takes as long as the copies: not for an event loop's thread.

        Args:
            version: name of the new weights; every token drawn after the swap carries it.
            tensors: (Hugging Face name, tensor) of all parameters; tied ones at least once. Their
                memory must never be written to again: an engine may serve from it. None: those in service have this
                digest, and get another version alone. Keys, values and prefixes stay, and responses that are running
                may carry either version.
            digest: manifest digest, reported back.

        Returns:
            A future. It waits for pinned requests (only such start meanwhile), and may be cancelled for as long as it
            waits. It fails with WeightsError where a tensor is missing, unknown or of another shape, or where there is
            no memory for it. It fails too where there are no tensors, and other weights are in service. Those in
            service stay in use then.

        Raises:
            EngineError: the engine is not running.
        """

    @abstractmethod
    def pause(self) -> Future[None]:
        """Stops decoding between two steps; running sequences stay as they are. Twice is as good as once.

        Weights can be swapped, requests submitted, aborted and copied meanwhile; a swap does not resume.

        Raises:
            EngineError: the engine is not running.
        """

    @abstractmethod
    def resume(self) -> Future[None]:
        """Continues after `pause`; where nothing is paused it does nothing.

        Returns:
            A future; it fails with EngineError where the engine is asleep (`wake` it).

        Raises:
            EngineError: the engine is not running.
        """

    @abstractmethod
    def sleep(self, *, keep_weights: bool = True) -> Future[SleepReport]:
        """Pauses, and gives back the memory of the KV cache and of the weights.

        Running sequences keep their tokens, and are prefilled again after `wake`. Requests can be submitted, aborted
        and copied, and weights swapped, meanwhile.

        Args:
            keep_weights: keep them in host memory until `wake`; else they are dropped, and the next
                `update_weights`, before or after `wake`, has to bring them. Pinned requests cannot be answered any
                more then: they end as aborted.

        Raises:
            EngineError: the engine is not running.
        """

    @abstractmethod
    def wake(self) -> Future[None]:
        """Allocates its memory again and continues, with the weights it kept, or else with the next ones it is given.

        Raises:
            EngineError: the engine is not running.
        """

    @abstractmethod
    def probe(self, token_ids: Sequence[int]) -> Future[ProbeResult]:
        """Runs tokens through the model between two decode steps, to check the weights in service.

        Args:
            token_ids: at least two, no more than the model's context.

        Returns:
            A future. It fails with WeightsError where there are no weights, and with EngineError where the tokens
            cannot be run (also while the engine is asleep). A failure changes nothing for others.

        Raises:
            PayloadError: tokens that the model cannot take; names the limit.
            EngineError: the engine is not running.
        """

    @abstractmethod
    def status(self) -> EngineStatus:
        """A snapshot; never blocks for a decode step."""

    @abstractmethod
    def ping(self) -> Future[Any]:
        """Asks the decoding thread or processes for an answer, which comes between two decode steps, paused or not.

        Returns:
            A future; it may take as long as a step, a swap, or a compilation.

        Raises:
            EngineError: the engine is not running.
        """

    @abstractmethod
    def process_state(self) -> ProcessState | None:
        """Reads the state of the processes, or the thread, that decode; None before they are ready, or if unknown."""

    @abstractmethod
    def drain(self, timeout_s: float) -> bool:
        """Waits until nothing is queued or active; False where `timeout_s` ran out first."""

    @abstractmethod
    def stop(self) -> None:
        """Aborts what is left (results are delivered), then ends the thread. May be called twice."""
