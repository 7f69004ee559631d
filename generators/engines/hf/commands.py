"""Commands of other threads to the engine's thread, which executes them between two decode steps, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rollmesh.generators.engines import commands
from rollmesh.generators.engines.commands import Pause, Probe, Resume, Sleep, Wake
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.hf.weights import StagedWeights
from rollmesh.generators.engines.types import GenerationRequest, PartialResponse
from rollmesh.mesh.errors import PayloadError


@dataclass(frozen=True, slots=True, eq=False)
class Submit:
    """Requests, checked."""

    requests: Sequence[GenerationRequest]


@dataclass(frozen=True, slots=True, eq=False)
class ImagesRead:
    """Requests whose images were read: (as submitted, as the model sees it or why it is refused)."""

    requests: Sequence[tuple[GenerationRequest, GenerationRequest | PayloadError]]


@dataclass(frozen=True, slots=True, eq=False)
class Abort:
    """Requests to be ended early."""

    request_ids: set[str]


@dataclass(frozen=True, slots=True, eq=False)
class Progress:
    """Responses to be copied; see `InferenceEngine.progress`."""

    at_least: Mapping[str, int]
    done: Future[list[PartialResponse]]


UpdateWeights = commands.UpdateWeights[StagedWeights]
Command = Submit | ImagesRead | Abort | Progress | Probe | UpdateWeights | Pause | Resume | Sleep | Wake


def resolve(done: Future[Any], value: Any) -> None:
    """Resolves a future, unless its owner has cancelled it."""
    if done.set_running_or_notify_cancel():
        done.set_result(value)


def reject(done: Future[Any], error: EngineError) -> None:
    """Fails a future, unless it has its answer or its owner has cancelled it."""
    if not done.done() and (done.running() or done.set_running_or_notify_cancel()):
        done.set_exception(error)
