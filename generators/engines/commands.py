"""Commands to an engine as a whole, from other threads; each has a future."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.types import ProbeResult, ServedWeights, SleepLevel, SleepReport, SwapTimings, WakeStep
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion

StagedT = TypeVar("StagedT")


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """See `InferenceEngine.probe`."""

    token_ids: Sequence[int]
    done: Future[ProbeResult]


@dataclass(frozen=True, slots=True, eq=False)
class Inspect:
    """See `InferenceEngine.weights`."""

    done: Future[ServedWeights]


@dataclass(frozen=True, slots=True, eq=False)
class Pause:
    """See `InferenceEngine.pause`."""

    done: Future[None]


@dataclass(frozen=True, slots=True, eq=False)
class Resume:
    """See `InferenceEngine.resume`."""

    done: Future[None]


@dataclass(frozen=True, slots=True, eq=False)
class Sleep:
    """See `InferenceEngine.sleep`."""

    level: SleepLevel
    done: Future[SleepReport]


@dataclass(frozen=True, slots=True, eq=False)
class Wake:
    """See `InferenceEngine.wake`."""

    step: WakeStep
    done: Future[None]


@dataclass(frozen=True, slots=True, eq=False)
class UpdateWeights(Generic[StagedT]):
    """Weights to be swapped in.

    Attributes:
        version, digest: as given to `update_weights`.
        staged: what the engine made of the tensors; None: the weights in service get another version.
        staging_s: it took.
        staged_at: performance counter at its end.
        done: of the swap.
    """

    version: PolicyVersion
    digest: str
    staged: StagedT | None
    staging_s: float
    staged_at: float
    done: Future[SwapTimings]

    def refuse_other_weights(self, digest: str) -> bool:
        """Refuses to relabel weights in service that have another digest than this version; True if it refused."""
        if digest == self.digest:
            return False
        self.done.set_exception(
            WeightsError(f"version {self.version} came without its weights, and others are in service", hint="fetch it")
        )
        return True

    def timings(self, begin: float, end: float, in_flight: int) -> SwapTimings:
        """Timings of a swap between two performance counters, with `in_flight` sequences running."""
        return SwapTimings(
            version=self.version,
            digest=self.digest,
            stage_us=self.staging_s * 1e6,
            wait_us=(begin - self.staged_at) * 1e6,
            pause_us=(end - begin) * 1e6,
            in_flight=in_flight,
        )


Control = Pause | Resume | Sleep | Wake
EngineCommand = Control | Probe | Inspect | UpdateWeights[Any]


def resolve(done: Future[Any], value: Any) -> None:
    """Resolves a future, unless its owner has cancelled it."""
    if done.set_running_or_notify_cancel():
        done.set_result(value)


def reject(done: Future[Any], error: EngineError) -> None:
    """Fails a future, unless it has its answer or its owner has cancelled it."""
    if not done.done() and (done.running() or done.set_running_or_notify_cancel()):
        done.set_exception(error)
