"""What other threads ask of the engine's thread; taken up between two decode steps, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from generators.engines.base import GenerationRequest, PartialResponse, ProbeResult, SwapTimings
from generators.engines.hf.weights import Staged
from mesh.versions import PolicyVersion


@dataclass(frozen=True, slots=True, eq=False)
class Submit:
    """Requests, checked."""

    requests: Sequence[GenerationRequest]


@dataclass(frozen=True, slots=True, eq=False)
class Abort:
    """Requests to be ended early."""

    request_ids: set[str]


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """Responses to be copied; see `InferenceEngine.progress`."""

    at_least: Mapping[str, int]
    done: Future[list[PartialResponse]]


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """Weights to be swapped in; `staging_s` is what it took to stage them, which was done at `staged_at` (performance
    counter)."""

    version: PolicyVersion
    weights: Staged
    digest: str
    staging_s: float
    staged_at: float
    done: Future[SwapTimings]


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """Tokens to be run through the model; see `InferenceEngine.probe`."""

    token_ids: Sequence[int]
    done: Future[ProbeResult]


Command = Submit | Abort | Progress | Probe | Update
