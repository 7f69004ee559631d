"""An `InferenceEngine` over a `Backend`: what is the same for all engines that decode by themselves.

Invariants: the books are touched in the engine's own thread alone; calls from other threads check what can be checked,
and post the rest to it. Whatever was promised (a future, a result) is kept or refused: also where the backend dies at
its start, amid a swap, or while the engine is being stopped.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from rollmesh.generators.engines.commanded import CommandedEngine
from rollmesh.generators.engines.commands import EngineCommand
from rollmesh.generators.engines.external.backend import Backend, LoadMetrics
from rollmesh.generators.engines.external.engine_thread import EngineThread
from rollmesh.generators.engines.external.inflight import InflightRegistry
from rollmesh.generators.engines.external.model_info import ModelInfo, read_folder
from rollmesh.generators.engines.interface import (
    EngineListener,
    EngineSettings,
    EngineStatus,
    GenerationRequest,
    PartialResponse,
    SwapTimings,
)
from rollmesh.generators.engines.request_validation import check_request
from rollmesh.mesh.liveness.freeze_detector import ProcessState
from rollmesh.mesh.trajectory.versions import PolicyVersion

if TYPE_CHECKING:
    import torch


class ExternalEngine(CommandedEngine):
    """An engine that decodes by itself, in processes or tasks of its own.

    A subclass says how its backend is made.

    Args:
        backend: not started.
        model: that it will run.
        settings: of the engine.
        listener: is told of tokens, results and failure.

    Attributes:
        takes_images: it hands them on to models that take images.
    """

    takes_images: ClassVar[bool] = True

    def __init__(self, backend: Backend, model: ModelInfo, settings: EngineSettings, listener: EngineListener) -> None:
        self._backend = backend
        self._limits, self._images = model.limits, model.images
        self._gate = InflightRegistry()
        self._life = EngineThread(backend, model, settings, listener, self._gate)

    @classmethod
    def from_folder(cls, folder: Path, settings: EngineSettings, listener: EngineListener) -> Self:
        model = read_folder(folder, settings.context)
        if not cls.takes_images:
            model = model.for_text()
        return cls(cls.create_backend(folder, model, settings), model, settings, listener)

    @classmethod
    @abstractmethod
    def create_backend(cls, folder: Path, model: ModelInfo, settings: EngineSettings) -> Backend:
        """A backend, not started; checks at once what can be checked cheaply.

        Args:
            folder: configuration and tokenizer files of the model; no weights.
            model: what they say; `model.limits.context` is the longest sequence that will be asked for.
            settings: of the engine.

        Raises:
            ConfigError: the engine's package is not installed, or a setting it cannot serve.
            DataError: a model that it cannot serve.
        """

    def start(self) -> None:
        self._life.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        requests = tuple(requests)
        for request in requests:
            check_request(request, self._limits, self._images if request.images else None)
        with self._gate.open():
            self._gate.admit(request.request_id for request in requests)
            self._life.post(self._life.dispatcher.submit, requests)

    def abort(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        self._gate.tell(lambda: self._life.post(self._life.dispatcher.abort, ids))

    def progress(self, at_least: Mapping[str, int]) -> Future[list[PartialResponse]]:
        done: Future[list[PartialResponse]] = Future()
        wanted = dict(at_least)

        def answer() -> None:
            if done.set_running_or_notify_cancel():
                done.set_result(self._life.dispatcher.progress(wanted))

        with self._gate.open(done):
            self._life.post(answer)
        return done

    def update_weights(
        self, version: PolicyVersion, tensors: Iterable[tuple[str, torch.Tensor]], digest: str
    ) -> Future[SwapTimings]:
        done = super().update_weights(version, tensors, digest)
        done.add_done_callback(self._called_off)
        return done

    def status(self) -> EngineStatus:
        active, failure = self._life.dispatcher.active, self._gate.failure
        conductor = self._life.conductor
        figures = self._backend.figures() if self._gate.up else LoadMetrics(0, 0, None, 0)
        return EngineStatus(
            active=active,
            queued=max(0, self._gate.in_flight - active),
            tokens_generated=self._life.dispatcher.tokens_generated,
            tokens_outside=self._life.dispatcher.tokens_outside,
            swaps=conductor.swaps,
            serving=conductor.serving,
            digest=conductor.digest,
            failure=None if failure is None else str(failure),
            state=conductor.state,
            kv_usage=figures.kv_usage,
            preemptions=figures.preemptions,
        )

    def ping(self) -> Future[None]:
        done: Future[None] = Future()
        with self._gate.open(done):
            self._life.post(self._life.ping, done)
        return done

    def sight(self) -> ProcessState | None:
        return self._backend.sight() if self._gate.up and self._gate.failure is None else None

    def drain(self, timeout_s: float) -> bool:
        return self._gate.drain(timeout_s)

    def stop(self) -> None:
        self._gate.stop(lambda: self._life.post(self._life.end))
        self._life.stop()

    def _called_off(self, done: Future[SwapTimings]) -> None:
        if done.cancelled():
            self._gate.tell(lambda: self._life.post(self._life.conductor.wake))

    def _enqueue(self, command: EngineCommand) -> None:
        with self._gate.open(command.done):
            self._life.order(command)

    def _wait_until_ready(self) -> None:
        # What weights have to look like is known to a backend that has loaded the model.
        self._gate.wait_until_up()

    def _stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Any:
        return self._backend.stage(tensors)

    def _discard(self, staged: Any) -> None:
        self._backend.discard(staged)
