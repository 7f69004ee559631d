"""An engine under the contract's tests, with what is needed to judge it.

An engine comes under the contract by two classes. A subclass of `EngineHarness` (of `ModelHarness` where it runs the
tiny model) says in `build` how an engine is made. A subclass of `EngineContract` has a fixture `harness` that makes one
per test and closes it. Every test gets a new `InferenceEngine` without weights. Its server or worker processes may be
one for the whole session, as long as nothing of an earlier test can be seen. Where engines may differ, class attributes
say so; tests are never overridden.

Tests never rely on time, nor on what happens between two particular steps. They wait for events, with deadlines, and
stop an engine (`freeze`) where something has to happen in the middle of a response.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from rollmesh.generators.engines.interface import EngineListener, InferenceEngine
from rollmesh.generators.engines.types import (
    GenerationRequest,
    GenerationResult,
    PartialResponse,
    SamplingParams,
    SwapTimings,
    TokenEvent,
)
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns
from tests.generators.engines import tiny
from tests.generators.engines.collector import DEADLINE_S, Collector

PROMPT = [3, 4, 5, 6]
V1, V2, V3 = PolicyVersion(1, 1), PolicyVersion(1, 2), PolicyVersion(2, 2)
Weights = dict[str, torch.Tensor]


class EngineHarness(ABC):
    """One engine, started, without weights.

    Attributes:
        slots: sequences that it decodes together, 3 to 15.
        vocabulary, eos, context: of its model, whose sequences end at `eos` alone; the context is at least 200.
        tolerance: of log-probs, compared with an independent forward pass in float32.
        seeded: equal seeds give equal draws, whatever else is decoded concurrently.
        sleep_frees: `sleep` gives memory back that it can tell of.
        drops_weights: `SleepLevel.WITHOUT_WEIGHTS` is possible.
        tells_late: most tokens that may have been sampled when it stands still and are told of only when it continues.
        reveals: tokens behind a swap that a response needs before the first of them is sent.
        joint_filters: top-k and top-p are both taken of the whole distribution, not one after the other.
        long: tokens of a response that is not over soon.
        deadline_s: for any one thing to happen.
    """

    slots: ClassVar[int] = 5
    vocabulary: ClassVar[int] = tiny.VOCABULARY
    eos: ClassVar[int] = tiny.EOS
    context: ClassVar[int] = tiny.CONTEXT
    tolerance: ClassVar[float] = 1e-3
    seeded: ClassVar[bool] = True
    sleep_frees: ClassVar[bool] = True
    drops_weights: ClassVar[bool] = True
    tells_late: ClassVar[int] = 0
    reveals: ClassVar[int] = 0
    joint_filters: ClassVar[bool] = False
    long: ClassVar[int] = 40
    deadline_s: ClassVar[float] = DEADLINE_S

    def __init__(self) -> None:
        self.collector = Collector(self.deadline_s)
        self.engine = self.build(self.collector)
        self.engine.start()

    @abstractmethod
    def build(self, listener: EngineListener) -> InferenceEngine:
        """A new engine, not started."""

    @abstractmethod
    def random_weights(self, seed: int) -> Weights:
        """Weights under which sequences vary and do not end."""

    @abstractmethod
    def constant_weights(self, token: int) -> Weights:
        """Weights under which every token drawn is `token`, with near certainty, whatever came before."""

    @abstractmethod
    def uniform_weights(self) -> Weights:
        """Weights under which all tokens but the end token are equally likely, whatever came before."""

    @abstractmethod
    def logits(self, weights: Weights, ids: list[int]) -> torch.Tensor:
        """Float32 [len(ids), vocabulary]: of each next token, from an independent forward pass."""

    @abstractmethod
    def text(self, ids: Sequence[int]) -> str:
        """The text of tokens by the engine's tokenizer, special ones left out."""

    @abstractmethod
    def fail_at(self, token: int) -> None:
        """From here on the engine's own code fails where it runs a prompt with this token."""

    def close(self) -> None:
        """Ends the engine; what is behind it may stay for the next test."""
        self.engine.stop()

    # --- for tests ---

    def update(self, version: PolicyVersion, weights: Weights) -> SwapTimings:
        """Swaps weights in and waits for it."""
        return self.engine.update_weights(version, weights.items(), str(version)).result(self.deadline_s)

    def run(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        """Results in the order of the requests."""
        self.engine.submit(requests)
        return self.collector.wait([request.request_id for request in requests])

    @contextmanager
    def slowly(self, tokens: int) -> Iterator[None]:
        """Around a request that has to arrive amid a response: keeps an engine from running ahead of this process.

        Args:
            tokens: new ones per response that the test waits for meanwhile.
        """
        # One that decodes in this process does as it is asked between two tokens.
        yield

    def freeze(
        self, requests: Sequence[GenerationRequest], *, tokens: int = 3, known: int = 1, again: bool = False
    ) -> dict[str, PartialResponse]:
        """Submits requests and pauses the engine once the first of them, a long one, has so many new tokens.

        Args:
            requests: as for `submit`.
            tokens: new ones of the first request.
            known: so many requests, the first included, have new tokens by then: long ones too.
            again: it stands still, and continues once it has the requests.

        Returns:
            What there is of those that are running.
        """
        first = requests[0].request_id
        streaming = [replace(item, stream=True) for item in requests[:known]]
        wanted = {item.request_id: 1 for item in streaming} | {first: tokens}
        with self.slowly(tokens):
            self.collector.when_streamed(wanted, self.engine.pause)
            self.engine.submit([*streaming, *requests[known:]])
            if again:
                self.resume()
            self.collector.wait_streamed(wanted)
            # The hook has asked for it from the engine's own thread; this one returns when it stands still.
            self.engine.pause().result(self.deadline_s)
        return self.progress([item.request_id for item in requests])

    def drawn(self, before: PartialResponse, result: GenerationResult) -> int:
        """Tokens of a result that were there when it was frozen, under the version of the last that was known then."""
        known, version = len(before.sampled), before.sampled.versions.versions[-1]
        if not self.tells_late:
            return known
        end = next(
            (i for i, other in enumerate(result.sampled.versions) if i >= known and other != version),
            len(result.sampled.versions),
        )
        assert known <= end <= known + self.tells_late
        return end

    def wake(self) -> None:
        """Wakes it and continues."""
        self.engine.wake().result(self.deadline_s)
        self.resume()

    def resume(self) -> None:
        """Continues after `freeze`."""
        self.engine.resume().result(self.deadline_s)

    def progress(self, request_ids: Sequence[str], at_least: int = 1) -> dict[str, PartialResponse]:
        """Those of these that run, by id."""
        found = self.engine.progress(dict.fromkeys(request_ids, at_least)).result(self.deadline_s)
        return {part.request_id: part for part in found}

    def log_probs(self, weights: Weights, ids: list[int], temperature: float = 1.0) -> NDArray[np.float32]:
        """Float32 [len(ids) - 1]: log-prob of each next token."""
        every = torch.log_softmax(self.logits(weights, ids)[:-1].float() / temperature, -1)
        found: NDArray[np.float32] = every.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
        return found

    def check_log_probs(
        self, result: GenerationResult, weights: Weights, prompt: Sequence[int], temperature: float = 1.0
    ) -> None:
        """They are those of one forward pass over the whole."""
        ids = result.sampled.response_ids.tolist()
        expected = self.log_probs(weights, [*prompt, *ids], temperature)[-len(ids) :]
        np.testing.assert_allclose(result.sampled.log_probs, expected, atol=self.tolerance)


class ModelHarness(EngineHarness):
    """An engine that runs the tiny model of `tiny.contract_model`."""

    def __init__(self, model: tiny.ContractModel) -> None:
        self.model = model
        super().__init__()

    def random_weights(self, seed: int) -> Weights:
        return self.model.random_weights(seed)

    def constant_weights(self, token: int) -> Weights:
        return self.model.constant_weights(token)

    def uniform_weights(self) -> Weights:
        weights = self.model.constant_weights(self.eos)
        return {name: -tensor if "lm_head" in name else tensor for name, tensor in weights.items()}

    def logits(self, weights: Weights, ids: list[int]) -> torch.Tensor:
        return self.model.logits(weights, ids)

    def text(self, ids: Sequence[int]) -> str:
        text = self.model.tokenizer.decode(list(ids), skip_special_tokens=True)
        assert isinstance(text, str)
        return text


def request(
    name: str,
    prompt: Sequence[int] = PROMPT,
    *,
    pinned: bool = False,
    stream: bool = False,
    prefix: Trajectory | None = None,
    **sampling: object,
) -> GenerationRequest:
    """A request in one line; `sampling` are fields of `SamplingParams`."""
    params = SamplingParams(**sampling)  # type: ignore[arg-type] # test shorthand
    return GenerationRequest(name, list(prompt), params, pinned, prefix, stream)


def behind(name: str, prefix: Trajectory, prompt: Sequence[int] = PROMPT, **fields: object) -> GenerationRequest:
    """A request that brings tokens."""
    return request(name, prompt, prefix=prefix, **fields)  # type: ignore[arg-type] # test shorthand


def prefix_of(result: GenerationResult, count: int) -> Trajectory:
    """The first tokens of a response, as a draft of it would have them."""
    runs = VersionRuns.merged((1, version) for version in list(result.sampled.versions)[:count])
    return Trajectory.sampled(result.sampled.response_ids[:count], result.sampled.log_probs[:count], runs)


def constant_prefix(token: int, count: int, version: PolicyVersion) -> Trajectory:
    """Tokens that no engine of the test has sampled; their log-probs tell them from sampled ones."""
    return Trajectory.sampled(
        np.full(count, token, np.int32), np.full(count, -7.25, np.float32), VersionRuns(((count, version),))
    )


def joined(events: Sequence[TokenEvent], request_id: str) -> Trajectory:
    """The tokens of one request's events, one after the other."""
    parts = [event.sampled for event in events if event.request_id == request_id]
    return Trajectory.sampled(
        np.concatenate([part.response_ids for part in parts]),
        np.concatenate([part.log_probs for part in parts]),
        VersionRuns.merged(run for part in parts for run in part.versions.runs),
    )
