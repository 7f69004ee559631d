"""An engine under the contract's tests: what it delivers is collected, requests and prefixes are built."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from generators.engines.base import (
    EngineError,
    GenerationRequest,
    GenerationResult,
    InferenceEngine,
    SampledTokens,
    SamplingParams,
    SwapTimings,
)
from mesh.versions import PolicyVersion, VersionRuns

DEADLINE_S = 30.0
PROMPT = [3, 4, 5, 6]


class Collector:
    """Receives an engine's results and lets a test wait for them; `hook` sees every batch in the engine's thread."""

    def __init__(self) -> None:
        self.results: dict[str, GenerationResult] = {}
        self.failure: EngineError | None = None
        self.hook: Callable[[list[GenerationResult]], None] | None = None
        self._changed = threading.Condition()

    def on_results(self, results: list[GenerationResult]) -> None:
        if self.hook is not None:
            self.hook(results)
        with self._changed:
            for result in results:
                assert result.request_id not in self.results, "a request ended twice"
                self.results[result.request_id] = result
            self._changed.notify_all()

    def on_failure(self, error: EngineError) -> None:
        with self._changed:
            self.failure = error
            self._changed.notify_all()

    def wait(self, request_ids: Sequence[str]) -> list[GenerationResult]:
        """The results of these requests, in this order."""

        def done() -> bool:
            return self.failure is not None or all(name in self.results for name in request_ids)

        with self._changed:
            assert self._changed.wait_for(done, DEADLINE_S), "results did not arrive in time"
            assert self.failure is None, self.failure
            return [self.results[name] for name in request_ids]

    def wait_failure(self) -> EngineError:
        with self._changed:
            assert self._changed.wait_for(lambda: self.failure is not None, DEADLINE_S)
            assert self.failure is not None
            return self.failure


class EngineHarness:
    """An engine under test with what is needed to judge it.

    Attributes:
        engine: started, without weights; its model ends a sequence at `eos` alone.
        collector: its callbacks.
        slots: of the engine; fewer than 16.
        vocabulary, eos, context: of its model.
    """

    engine: InferenceEngine
    collector: Collector
    slots: int
    vocabulary: int
    eos: int
    context: int

    def random_weights(self, seed: int) -> dict[str, torch.Tensor]:
        """Weights under which sequences vary and seldom end."""
        raise NotImplementedError

    def constant_weights(self, token: int) -> dict[str, torch.Tensor]:
        """Weights under which every token drawn is `token`, with near certainty, whatever came before."""
        raise NotImplementedError

    def log_probs(self, weights: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
        """Float32 [len(ids) - 1]: log-prob of each next token, from an independent forward pass."""
        raise NotImplementedError

    def text(self, ids: Sequence[int]) -> str:
        """What the engine's tokenizer makes of tokens."""
        raise NotImplementedError

    def update(self, version: PolicyVersion, weights: dict[str, torch.Tensor]) -> SwapTimings:
        return self.engine.update_weights(version, weights.items(), str(version)).result(DEADLINE_S)

    def run(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        self.engine.submit(requests)
        return self.collector.wait([request.request_id for request in requests])


def request(
    name: str, prompt: Sequence[int] = PROMPT, *, pinned: bool = False, **sampling: object
) -> GenerationRequest:
    return GenerationRequest(name, list(prompt), SamplingParams(**sampling), pinned)  # type: ignore[arg-type] # test shorthand


def prefix_of(result: GenerationResult, count: int) -> SampledTokens:
    """The first tokens of a response, as a draft of it would have them."""
    runs = VersionRuns.from_tokens(list(result.versions)[:count])
    return SampledTokens(result.response_ids[:count], result.log_probs[:count], runs)


def constant_prefix(token: int, count: int, version: PolicyVersion) -> SampledTokens:
    """Tokens that no engine of the test has sampled; their log-probs tell them from sampled ones."""
    return SampledTokens(
        np.full(count, token, np.int32), np.full(count, -7.25, np.float32), VersionRuns(((count, version),))
    )


def behind(
    name: str, prefix: SampledTokens, prompt: Sequence[int] = PROMPT, *, pinned: bool = False, **sampling: object
) -> GenerationRequest:
    return replace(request(name, prompt, pinned=pinned, **sampling), prefix=prefix)


V1, V2, V3 = PolicyVersion(1, 1), PolicyVersion(1, 2), PolicyVersion(2, 2)
