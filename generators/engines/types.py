"""Records that pass between an inference engine and its callers: requests, tokens, results, reports and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.versions import PolicyVersion

if TYPE_CHECKING:
    import torch

    from rollmesh.generators.engines.adapters import AdapterShape
    from rollmesh.mesh.config.derived.memory_release import Release
    from rollmesh.mesh.config.rollout import HfSection, SglangSection, VllmSection

FinishReason = Literal["stop", "length", "aborted"]
# The treatment of running sequences at a swap. `keep`: they continue with the keys and values that older weights made.
# `recompute`: all are prefilled again, together, before the next step. `interrupt`: all are stopped and put back at the
# head of the queue, in the order in which they started. They continue as requests with their tokens as prefix. Each
# step prefills a bounded number of these tokens, while the sequences that are ready decode.
KvPolicy = Literal["keep", "recompute", "interrupt"]
EngineState = Literal["running", "paused", "asleep"]


class SleepLevel(IntEnum):
    """Memory that a sleeping engine gives back; each level includes those before it."""

    WITHOUT_KV_CACHE = 1
    """Weights stay in host memory."""
    WITHOUT_WEIGHTS = 2
    """The next update of weights brings them all."""


class WakeStep(IntEnum):
    """Memory that an engine takes when it wakes; each step includes those before it."""

    WEIGHTS = 1
    """It is asleep still, and has room for weights."""
    KV_CACHE = 2
    """It is paused."""


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
        grammar: text that the response has to be of, see `token_grammar`; log-probs are of the allowed tokens alone.
            Empty: any.
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
    grammar: str = ""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for one response.

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
        seen: digest of the tokens to which images widen `prompt_ids`, without those of earlier turns; empty: not known.
            A request that the engine's processor widens in another way is refused.
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
    seen: str = ""
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
    """A sampled response.

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
        pause_us: for which decoding stood still; includes re-prefilling running sequences (KV policy `recompute`).
        in_flight: sequences that continue under the new weights.
    """

    version: PolicyVersion
    digest: str
    stage_us: float
    wait_us: float
    pause_us: float
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


@dataclass(frozen=True, slots=True, eq=False)
class ServedWeights:
    """The weights in service.

    Attributes:
        version, digest: as given to `update_weights`.
        tensors: see `ProbeResult`.
    """

    version: PolicyVersion
    digest: str
    tensors: Mapping[str, torch.Tensor] | None


@dataclass(frozen=True, slots=True)
class SleepReport:
    """Memory that `sleep` gave back.

    Attributes:
        freed_bytes: of the engine's device as far as it knows; 0 where it frees no memory (SGLang on a CPU).
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
        digest: manifest digest of the weights; empty without weights.
        failure: what ended the engine; None while it lives.
        state: running (also while it waits for its first weights), paused or asleep.
        kv_usage: share of the KV cache that is in use, 0 to 1; None where the engine has no such bound.
        preemptions: sequences that lost their KV cache for lack of memory, since the start.
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
        threads: compute threads on a CPU, all worker processes together.
        allow_insecure: it may talk unprotected to other machines.
        release: how it gives memory back to a learner, `memory` or `process`: its processes end. Only engines with
            processes of their own can do the latter. None: no learner shares its devices.
        adapters: weights are adapters of this shape, with which the engine computes next to their base; None: it gets
            whole weights.
        restart_timeout_s: seconds that processes get to start again after a sleep; None: any time.
        hf, vllm, sglang: settings of these engines; None: their defaults.
    """

    slots: int = 64
    dtype: str = "float32"
    context: int | None = None
    kv: KvPolicy = "keep"
    device: str = "cpu"
    sharing: int = 1
    threads: int = 1
    allow_insecure: bool = False
    release: Release | None = None
    adapters: AdapterShape | None = None
    restart_timeout_s: float | None = None
    hf: HfSection | None = None
    vllm: VllmSection | None = None
    sglang: SglangSection | None = None
