"""An `InferenceEngine` over a `Backend`: the part that all engines share which decode by themselves.

Invariants: state changes in the engine's own thread alone; calls from other threads check what can be checked, and post
the rest to it. Every promise (a future, a result) is kept or refused. This holds also where the backend dies at its
start, amid a swap, or while the engine is being stopped.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

from rollmesh.generators.engines.adapters import AdapterWeights, WeightSet
from rollmesh.generators.engines.commands import EngineCommand, resolve
from rollmesh.generators.engines.control_calls import ControlledEngine
from rollmesh.generators.engines.external.backend import Backend, LoadMetrics, state_of_start
from rollmesh.generators.engines.external.engine_thread import EngineThread
from rollmesh.generators.engines.external.inflight import InflightRegistry
from rollmesh.generators.engines.external.model_info import ModelInfo, read_folder
from rollmesh.generators.engines.external.restarting_backend import RestartingBackend
from rollmesh.generators.engines.interface import EngineListener
from rollmesh.generators.engines.types import (
    EngineSettings,
    EngineStatus,
    GenerationRequest,
    PartialResponse,
    SwapTimings,
)
from rollmesh.mesh.liveness.freeze_detector import ProcessState
from rollmesh.mesh.trajectory.versions import PolicyVersion


class ExternalEngine(ControlledEngine):
    """An engine that decodes by itself, in processes or tasks of its own.

    A subclass says how its backend is made.

    Args:
        backend: not started.
        model: that it will run.
        settings: of the engine.
        listener: receives tokens, results and the failure.

    Attributes:
        takes_images: it passes images to models that take them.
    """

    takes_images: ClassVar[bool] = True

    def __init__(self, backend: Backend, model: ModelInfo, settings: EngineSettings, listener: EngineListener) -> None:
        self._backend = backend
        self._limits, self._images = model.limits, model.images
        self._inflight = InflightRegistry()
        self._thread = EngineThread(backend, model, settings, listener, self._inflight)

    @classmethod
    def from_folder(cls, folder: Path, settings: EngineSettings, listener: EngineListener) -> Self:
        model = read_folder(folder, settings.context)
        if not cls.takes_images:
            model = model.for_text()
        create = partial(cls.create_backend, folder, model, settings)
        restarts = settings.release == "process"
        backend = RestartingBackend(create, settings.restart_timeout_s) if restarts else create()
        return cls(backend, model, settings, listener)

    @classmethod
    @abstractmethod
    def create_backend(cls, folder: Path, model: ModelInfo, settings: EngineSettings) -> Backend:
        """A backend, not started; makes all cheap checks at once.

        Args:
            folder: configuration and tokenizer files of the model; no weights.
            model: what they say; `model.limits.context` is the longest sequence that will be asked for.
            settings: of the engine.

        Raises:
            ConfigError: the engine's package is not installed, or a setting it cannot serve.
            DataError: a model that it cannot serve.
        """

    def start(self) -> None:
        self._thread.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        requests = self._checked(requests)
        with self._inflight.accepting():
            self._inflight.add(request.request_id for request in requests)
            self._thread.post(self._thread.scheduler.submit, requests)

    def abort(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        self._inflight.run_if_open(lambda: self._thread.post(self._thread.scheduler.abort, ids))

    def progress(self, at_least: Mapping[str, int]) -> Future[list[PartialResponse]]:
        done: Future[list[PartialResponse]] = Future()
        least = dict(at_least)

        def answer() -> None:
            resolve(done, self._thread.scheduler.progress(least))

        with self._inflight.accepting(done):
            self._thread.post(answer)
        return done

    def update_weights(self, version: PolicyVersion, weights: WeightSet | None, digest: str) -> Future[SwapTimings]:
        done = super().update_weights(version, weights, digest)
        done.add_done_callback(self._on_update_done)
        return done

    def status(self) -> EngineStatus:
        active, failure = self._thread.scheduler.active, self._inflight.failure
        executor = self._thread.executor
        metrics = self._backend.load_metrics() if self._inflight.up else LoadMetrics(0, 0, None, 0)
        return EngineStatus(
            active=active,
            queued=max(0, self._inflight.count() - active),
            tokens_generated=self._thread.scheduler.tokens_generated,
            tokens_outside=self._thread.scheduler.tokens_outside,
            swaps=executor.swaps,
            serving=executor.serving,
            digest=executor.digest,
            failure=None if failure is None else str(failure),
            state=executor.state,
            kv_usage=metrics.kv_usage,
            preemptions=metrics.preemptions,
        )

    def ping(self) -> Future[None]:
        done: Future[None] = Future()
        with self._inflight.accepting(done):
            self._thread.post(self._thread.ping, done)
        return done

    def process_state(self) -> ProcessState | None:
        if self._inflight.failure is not None:
            return None
        state = self._backend.process_state()
        return state if self._inflight.up else state_of_start(state)

    def drain(self, timeout_s: float) -> bool:
        return self._inflight.drain(timeout_s)

    def stop(self) -> None:
        self._inflight.stop_after(lambda: self._thread.post(self._thread.end))
        self._thread.stop()

    def _on_update_done(self, done: Future[SwapTimings]) -> None:
        if done.cancelled():
            self._inflight.run_if_open(lambda: self._thread.post(self._thread.executor.wake))

    def _enqueue(self, command: EngineCommand) -> None:
        with self._inflight.accepting(command.done):
            self._thread.enqueue(command)

    def _wait_until_ready(self) -> None:
        # Only a backend that has loaded the model knows the names and shapes of its weights.
        self._inflight.wait_until_up()

    def _stage(self, weights: WeightSet) -> Any:
        if isinstance(weights, AdapterWeights):
            return self._backend.stage_adapter(weights)
        return self._backend.stage(weights)

    def _discard(self, staged: Any) -> None:
        self._backend.discard(staged)
