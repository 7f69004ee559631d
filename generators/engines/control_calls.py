"""Control calls as commands: checked in the caller's thread, carried out in the engine's own."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from rollmesh.generators.engines.adapters import WeightSet
from rollmesh.generators.engines.commands import (
    EngineCommand,
    Inspect,
    Pause,
    Probe,
    Resume,
    Sleep,
    UpdateWeights,
    Wake,
)
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.interface import InferenceEngine
from rollmesh.generators.engines.request_validation import RequestLimits, check_request, check_tokens
from rollmesh.generators.engines.types import (
    GenerationRequest,
    ProbeResult,
    ServedWeights,
    SleepLevel,
    SleepReport,
    SwapTimings,
    WakeStep,
)
from rollmesh.mesh.errors import PayloadError, WeightsError
from rollmesh.mesh.trajectory.images import ImageProcessor
from rollmesh.mesh.trajectory.versions import PolicyVersion


class ControlledEngine(InferenceEngine):
    """The calls that change or probe the engine as a whole; a subclass passes commands to its thread."""

    _limits: RequestLimits
    _images: ImageProcessor | None

    @abstractmethod
    def _enqueue(self, command: EngineCommand) -> None:
        """Passes a command to the engine's thread.

        Raises:
            EngineError: the engine is not running.
        """

    @abstractmethod
    def _wait_until_ready(self) -> None:
        """Returns when the engine knows the names and shapes of its weights.

        Raises:
            EngineError: the engine is not running.
        """

    @abstractmethod
    def _stage(self, weights: WeightSet) -> Any:
        """Checks the tensors of an update, and copies those that cannot serve as they are.

        Raises:
            WeightsError: see `update_weights`.
        """

    def _discard(self, staged: Any) -> None:
        """Releases the result of `_stage`, where no update takes it."""

    def _checked(self, requests: Sequence[GenerationRequest]) -> tuple[GenerationRequest, ...]:
        """The requests of a `submit`, all or none.

        Raises:
            PayloadError: see `submit`.
        """
        checked = tuple(requests)
        for request in checked:
            check_request(request, self._limits, self._images if request.images else None)
            if request.sampling.grammar:
                self._check_grammar(request)
        return checked

    def _check_grammar(self, request: GenerationRequest) -> None:
        if not self.takes_grammars:
            raise PayloadError("sampling.grammar", f"engine {self.name} takes none")
        if not self.resumes_grammars and (request.prefix is not None or request.stream):
            raise PayloadError(
                "sampling.grammar",
                f"engine {self.name} draws such a response whole: without a prefix, and not streamed",
            )

    def update_weights(self, version: PolicyVersion, weights: WeightSet | None, digest: str) -> Future[SwapTimings]:
        done: Future[SwapTimings] = Future()
        self._wait_until_ready()
        called_at = time.perf_counter()
        try:
            staged = None if weights is None else self._stage(weights)
        except WeightsError as error:
            done.set_exception(error)
            return done
        staged_at = time.perf_counter()
        try:
            self._enqueue(UpdateWeights(version, digest, staged, staged_at - called_at, staged_at, done))
        except EngineError:
            if staged is not None:
                self._discard(staged)
            raise
        return done

    def pause(self) -> Future[None]:
        done: Future[None] = Future()
        self._enqueue(Pause(done))
        return done

    def resume(self) -> Future[None]:
        done: Future[None] = Future()
        self._enqueue(Resume(done))
        return done

    def sleep(self, level: SleepLevel = SleepLevel.WITHOUT_KV_CACHE) -> Future[SleepReport]:
        done: Future[SleepReport] = Future()
        self._enqueue(Sleep(level, done))
        return done

    def wake(self, step: WakeStep = WakeStep.KV_CACHE) -> Future[None]:
        done: Future[None] = Future()
        self._enqueue(Wake(step, done))
        return done

    def weights(self) -> Future[ServedWeights]:
        done: Future[ServedWeights] = Future()
        self._enqueue(Inspect(done))
        return done

    def probe(self, token_ids: Sequence[int]) -> Future[ProbeResult]:
        check_tokens(token_ids, self._limits)
        done: Future[ProbeResult] = Future()
        self._enqueue(Probe(tuple(token_ids), done))
        return done
