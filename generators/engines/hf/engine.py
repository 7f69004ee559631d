"""The `hf` engine as other threads see it: every call checks, and hands a command to the engine's own thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from rollmesh.generators.engines.adapters import AdapterWeights, WeightSet
from rollmesh.generators.engines.commands import EngineCommand
from rollmesh.generators.engines.control_calls import ControlledEngine
from rollmesh.generators.engines.hf.command_queue import CommandQueue, Progress
from rollmesh.generators.engines.hf.decode_loop import DecodeLoop
from rollmesh.generators.engines.hf.decoder import Decoder
from rollmesh.generators.engines.hf.image_reader import ImageReader
from rollmesh.generators.engines.hf.model.expert_recorder import ExpertRecorder
from rollmesh.generators.engines.hf.model.loading import LoadedModel, load_model
from rollmesh.generators.engines.hf.weights import ModelWeights, StagedWeights
from rollmesh.generators.engines.interface import EngineListener
from rollmesh.generators.engines.types import EngineSettings, EngineStatus, GenerationRequest, PartialResponse
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.liveness.freeze_detector import ProcessState
from rollmesh.mesh.liveness.process_state import read_thread

log = logging.getLogger(__name__)
# Seconds that the thread gets to end; it ends between two steps.
_STOP_S = 30.0


class HfEngine(ControlledEngine):
    """Continuous batching over a Hugging Face model's own forward pass.

    Args:
        loaded: the model; its parameters are replaced by `update_weights`.
        settings: slots and KV policy; the rest is the model's already.
        listener: receives tokens, results and the failure.
    """

    name = "hf"
    takes_grammars = resumes_grammars = True

    def __init__(self, loaded: LoadedModel, settings: EngineSettings, listener: EngineListener) -> None:
        self._limits = loaded.limits
        self._images = loaded.images
        self._weights = ModelWeights(loaded.model)
        gib = None if settings.hf is None else settings.hf.kv_cache_gib
        kv_bytes = None if gib is None else int(gib * 2**30)
        recorded = settings.hf is not None and settings.hf.routed_experts
        recorder = ExpertRecorder(loaded.model) if recorded else None
        self._decoder = Decoder(loaded, settings.slots, kv_bytes, settings.sharing, recorder)
        self._commands = CommandQueue()
        image_reader = ImageReader(loaded.images, loaded.limits, self._commands)
        self._loop = DecodeLoop(self._decoder, self._weights, image_reader, self._commands, listener, settings.kv)
        self._thread = threading.Thread(target=self._loop.run, name="hf-engine", daemon=True)

    @classmethod
    def from_folder(cls, folder: Path, settings: EngineSettings, listener: EngineListener) -> HfEngine:
        loaded = load_model(folder, dtype=settings.dtype, device=settings.device, context=settings.context)
        return cls(loaded, settings, listener)

    def start(self) -> None:
        self._thread.start()

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._commands.submit(self._checked(requests))

    def abort(self, request_ids: Iterable[str]) -> None:
        self._commands.abort(request_ids)

    def progress(self, at_least: Mapping[str, int]) -> Future[list[PartialResponse]]:
        done: Future[list[PartialResponse]] = Future()
        self._commands.put(Progress(dict(at_least), done))
        return done

    def _enqueue(self, command: EngineCommand) -> None:
        self._commands.put(command)

    def _wait_until_ready(self) -> None:
        self._commands.check()

    def _stage(self, weights: WeightSet) -> StagedWeights:
        if isinstance(weights, AdapterWeights):
            raise WeightsError("engine hf computes with no adapters", hint="set learner.lora.push: merged")
        return self._weights.stage(weights)

    def status(self) -> EngineStatus:
        loop, active, failure = self._loop, self._decoder.table.active, self._commands.failure
        return EngineStatus(
            active=active,
            queued=max(0, self._commands.count() - active),
            tokens_generated=self._decoder.tokens_generated,
            tokens_outside=self._decoder.tokens_outside,
            swaps=loop.swaps,
            serving=self._decoder.serving,
            digest=loop.digest,
            failure=None if failure is None else str(failure),
            state=loop.state,
            kv_usage=self._decoder.kv_usage,
            preemptions=loop.preemptions,
        )

    def ping(self) -> Future[list[PartialResponse]]:
        return self.progress({})

    def process_state(self) -> ProcessState | None:
        thread = self._thread.native_id
        return read_thread(thread) if thread is not None else None

    def drain(self, timeout_s: float) -> bool:
        return self._commands.drain(timeout_s)

    def stop(self) -> None:
        self._commands.stop()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)
            if self._thread.is_alive():
                log.error("the engine's thread does not end; it is abandoned")
