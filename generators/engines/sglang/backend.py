"""A server of SGLang as a backend: translates jobs and commands.

Seeds: a request's seed is not passed on, and draws are seeded for the server as a whole. SGLang draws with a request's
own seed only in its deterministic mode. It has that on CUDA with some attention kernels, and not on a CPU.

Filters: SGLang takes the nucleus of the whole distribution also where top-k cuts it, and reports truly what it drew
from. Other engines take it of the tokens that top-k has left.

Stop strings are found here: the server runs without a tokenizer, takes token ids and gives token ids.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
from numpy.typing import NDArray

from rollmesh.generators.engines.adapters import AdapterWeights
from rollmesh.generators.engines.checkpoint_names import CheckpointLayout
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.external.backend import Backend, DecodeChunk, DecodeJob, LoadMetrics
from rollmesh.generators.engines.external.model_info import ModelInfo
from rollmesh.generators.engines.external.process_log import last_error
from rollmesh.generators.engines.external.served_adapters import ServedAdapters, StagedAdapter
from rollmesh.generators.engines.request_validation import RequestLimits
from rollmesh.generators.engines.sglang import request_bodies, server_args
from rollmesh.generators.engines.sglang.adapters import (
    AdapterLoader,
    SharedAdapter,
    adapted_layers,
    adapter_arguments,
)
from rollmesh.generators.engines.sglang.load_monitor import LoadMonitor
from rollmesh.generators.engines.sglang.request_streams import RequestStreams
from rollmesh.generators.engines.sglang.server import Server
from rollmesh.generators.engines.sglang.server_features import detect_features
from rollmesh.generators.engines.sglang.server_process import ServerProcess
from rollmesh.generators.engines.sglang.transfers import ServerTransfer, StagedWeights
from rollmesh.generators.engines.sglang.transfers.disk import DiskTransfer
from rollmesh.generators.engines.sglang.transfers.distributed import DistributedTransfer
from rollmesh.generators.engines.sglang.transfers.tensor import TensorTransfer
from rollmesh.generators.engines.types import EngineSettings, SleepLevel, SleepReport, WakeStep
from rollmesh.mesh.config.rollout import SglangSection
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.liveness.freeze_detector import ProcessState
from rollmesh.mesh.model_config import read_config

log = logging.getLogger(__name__)

_IDLE_S = 300.0
# The server's names for the memory of the weights, and of CUDA graphs.
_WEIGHTS, _GRAPHS = "weights", "cuda_graph"
_LOCAL = ("127.0.0.1", "localhost", "::1")


class SglangBackend(Backend):
    """A backend for one SGLang server.

    Args:
        folder: of the model.
        model: as its folder describes it.
        settings: see there.

    Raises:
        ConfigError: settings that contradict each other.
        DataError: it is no language model.
    """

    def __init__(self, folder: Path, model: ModelInfo, settings: EngineSettings) -> None:
        self._folder = folder
        self._model = model
        self._settings = settings
        self._section = settings.sglang or SglangSection()
        shape = settings.adapters
        server_args.check(self._section, allow_insecure=settings.allow_insecure, adapters=shape is not None)
        # Checked now: an impossible choice is refused before anything starts.
        self._sending_device = (
            server_args.sending_device(settings, self._section) if self._section.transfer == "distributed" else None
        )
        config = read_config(folder)
        self._checkpoint = CheckpointLayout(config, getattr(torch, settings.dtype))
        self._adapters = ServedAdapters()
        self._adapted: frozenset[str] = frozenset()
        if shape is not None:
            self._adapted = adapted_layers(shape, self._checkpoint.linear_layers(), experts=model.experts)
        self._server: Server | None = None
        self._released: list[str] = []

    async def start(self, on_death: Callable[[str], None]) -> RequestLimits:
        """See Backend."""
        shape = self._settings.adapters
        adapters = None if shape is None else adapter_arguments(shape, self._adapted)
        server = self._server = Server(self._folder, self._model, self._settings, self._section, adapters, on_death)
        try:
            await server.open()
            return await self._connect(server)
        except BaseException:
            await self.stop()
            raise

    async def _connect(self, server: Server) -> RequestLimits:
        self._client = server.client
        address = self._client.address
        transfer = self._choose_transfer(address)
        self._features = await detect_features(self._client, transfer)
        shape = self._settings.adapters
        if shape is not None and self._features.adapter_rank < shape.rank:
            raise EngineError(
                f"the SGLang server at {address} takes no adapters of rank {shape.rank}",
                hint="start it with --enable-lora, --max-lora-rank and --lora-target-modules, or choose "
                "learner.lora.push: merged",
            )
        if self._settings.kv == "keep" and shape is None and not self._features.drains:
            raise EngineError(
                f"the SGLang server at {address} replaces weights while a step of the running sequences is under way",
                hint="start it with --disable-overlap-schedule, or choose weights.kv: recompute",
            )
        self._transfer = self._make_transfer(transfer, server.process)
        limits = self._model.limits
        if server.process is None:
            limits = replace(limits, context=min(limits.context, self._features.context))
        self._loader = AdapterLoader(self._client, self._adapters, self._features.ranks)
        self._requests = RequestStreams(self._client, self._features, limits, self._model.tokenizer, self._adapters)
        # A server of ours is judged by the state of its processes (`engine_watch`), which the clock does not know.
        on_silence = server.report_death if server.process is None else None
        self._monitor = LoadMonitor(self._client, self._features.load, on_silence)
        self._monitor.start()
        server.up = True
        log.info(
            "SGLang %s at %s serves %s; weights go over %s", self._features.version, address, self._folder, transfer
        )
        return limits

    # --- jobs ---

    async def generate(self, job: DecodeJob, on_chunk: Callable[[DecodeChunk], None]) -> None:
        """See Backend."""
        await self._requests.generate(job, on_chunk)

    async def abort(self, job_ids: Iterable[str]) -> None:
        """See Backend."""
        self._requests.abort(list(job_ids))

    async def pause(self) -> None:
        """See Backend; the last sampled tokens may come a moment later, with their true version."""
        await self._loader.settle()
        await self._client.post("/pause_generation", {"mode": "in_place"})
        self._requests.paused = True

    async def resume(self) -> None:
        """See Backend."""
        await self._client.post("/continue_generation")
        self._requests.paused = False
        self._loader.unload_idle()

    # --- weights ---

    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights:
        """See Backend."""
        return self._transfer.stage(list(self._checkpoint.to_checkpoint(tensors).items()))

    def stage_adapter(self, adapter: AdapterWeights) -> StagedAdapter:
        """See Backend."""
        shapes = self._checkpoint.shapes
        return self._adapters.stage(adapter, form=lambda one: SharedAdapter(one, shapes), stage_base=self.stage)

    def interrupts(self, staged: Any, *, recompute: bool) -> bool:
        """See Backend."""
        return isinstance(staged, StagedAdapter) and self._adapters.interrupts(staged, recompute=recompute)

    async def load(self, staged: Any, label: str, *, recompute: bool) -> None:
        """See Backend."""
        if not isinstance(staged, StagedAdapter):
            await self._load_whole(staged, label, recompute=recompute)
            return
        await self._adapters.install(
            staged,
            label,
            stage_base=self.stage,
            load_base=lambda base: self._load_whole(base, label, recompute=True),
            load=self._loader.load,
        )

    async def _load_whole(self, staged: StagedWeights, label: str, *, recompute: bool) -> None:
        self._requests.begin_update(recompute=recompute)
        try:
            if recompute:
                # All lose their keys and values, and nothing is left in the prefix cache.
                await self._client.post("/pause_generation", {"mode": "retract"})
                await self._client.post("/flush_cache")
            if _WEIGHTS in self._released:
                await self._resume_memory([_WEIGHTS])
            await self._transfer.load(self._client, staged, label)
            self._requests.end_update(label)
        except WeightsError:
            self._requests.cancel_update()
            raise
        finally:
            await asyncio.to_thread(staged.discard)

    def discard(self, staged: Any) -> None:
        """See Backend."""
        if isinstance(staged, StagedAdapter):
            staged.form.discard()
            staged = staged.base
        if staged is not None:
            staged.discard()

    async def log_probs(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """See Backend."""
        if self._requests.paused:
            raise EngineError("a paused SGLang server runs no tokens", hint="resume it first")
        newest = self._adapters.newest
        body = request_bodies.log_probs(token_ids, uuid.uuid4().hex, None if newest is None else newest.name)
        answer = await self._client.post("/generate", body)
        try:
            entries = answer["meta_info"]["input_token_logprobs"]
            found = [entry[1] for entry in entries], np.array([entry[0] for entry in entries[1:]], np.float32)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(f"the SGLang server scores tokens and does not say how: {str(answer)[:200]}") from error
        if found[0] != list(token_ids):
            raise EngineError("the SGLang server gives log-probs of other tokens than it was asked for")
        return found[1]

    # --- memory ---

    async def sleep(self, level: SleepLevel) -> SleepReport:
        """See Backend."""
        begin = time.monotonic()
        if not self._features.sleeps:
            return SleepReport(0, time.monotonic() - begin)
        if not self._released:
            # Requests that were aborted while it was paused end with its next step, and it has to be idle for this.
            await self.resume()
            await self._client.post(f"/flush_cache?timeout={_IDLE_S:g}")
            await self.pause()
        tags = ["kv_cache", _GRAPHS]
        if level >= SleepLevel.WITHOUT_WEIGHTS or self._features.keeps_asleep:
            tags.append(_WEIGHTS)
        tags = [tag for tag in tags if tag not in self._released]
        if not tags:
            return SleepReport(0, time.monotonic() - begin)
        if level >= SleepLevel.WITHOUT_WEIGHTS:
            # Weights that are given up come again, the base too.
            await self._loader.unload_all()
        await self._client.post("/release_memory_occupation", {"tags": tags})
        self._released += tags
        return SleepReport(await self._memory_of(tags), time.monotonic() - begin)

    async def wake(self, step: WakeStep) -> None:
        """See Backend."""
        tags = [tag for tag in self._released if step >= WakeStep.KV_CACHE or tag == _WEIGHTS]
        if tags:
            await self._resume_memory(tags)

    async def _resume_memory(self, tags: list[str]) -> None:
        """Takes memory back, released parts alone: for others the server would end."""
        await self._client.post("/resume_memory_occupation", {"tags": tags})
        self._released = [tag for tag in self._released if tag not in tags]

    # --- its state ---

    async def ping(self) -> None:
        """See Backend; a server that was not started here is watched by the monitor alone."""
        if self._server is not None and self._server.process is not None:
            # Its front asks every scheduler; for other statuses it does not.
            await self._client.get("/server_info")

    def process_state(self) -> ProcessState | None:
        """See Backend."""
        process = self._server.process if self._server is not None else None
        return process.process_state() if process is not None else None

    def last_error(self) -> str:
        """See Backend."""
        process = self._server.process if self._server is not None else None
        return last_error(process.log_file) if process is not None else ""

    def load_metrics(self) -> LoadMetrics:
        """See Backend."""
        return replace(self._monitor.latest, preemptions=self._requests.preemptions)

    async def stop(self) -> None:
        """See Backend."""
        server = self._server
        if server is None:
            return
        server.expect_end()
        if server.up:
            await self._monitor.stop()
            if not server.death:
                await self._requests.close()
                if server.process is None:
                    await self._leave_server()
            self._loader.close()
            await self._transfer.close()
            # The rest may be repeated.
            server.up = False
        await server.close()

    # --- its parts ---

    async def _leave_server(self) -> None:
        """Leaves a server that runs on: decoding, without our adapters."""
        if self._requests.paused:
            # A server that stands still for long takes itself for hung.
            with suppress(EngineError):
                await self.resume()
        await self._loader.unload_all()

    def _choose_transfer(self, address: str) -> str:
        chosen = self._section.transfer
        if chosen != "auto":
            return chosen
        replicas = self._section.data_parallel > 1
        return "tensor" if urlsplit(address).hostname in _LOCAL and not replicas else "disk"

    def _make_transfer(self, name: str, process: ServerProcess | None) -> ServerTransfer:
        features = self._features
        if name == "tensor":
            return TensorTransfer(self._checkpoint.dtype_of, features.ranks, session=features.session)
        if name == "disk":
            folder = process.scratch if process is not None else self._folder
            return DiskTransfer(self._checkpoint.dtype_of, folder)
        assert self._sending_device is not None, "the only other way"
        return DistributedTransfer(
            self._checkpoint.dtype_of, features.ranks, session=features.session, device=self._sending_device
        )

    async def _memory_of(self, tags: list[str]) -> int:
        """Bytes that these parts occupy, by the server's own account.

        Only our own servers are known to give their graphs back: a variable decides that.
        """
        if self._server is not None and self._server.process is None:
            tags = [tag for tag in tags if tag != _GRAPHS]
        info = await self._client.get("/server_info")
        usage = (info.get("internal_states") or [{}])[0].get("memory_usage") or {}
        names = {"kv_cache": "kvcache", _WEIGHTS: "weight", _GRAPHS: "graph"}
        gigabytes = [usage.get(names[tag]) for tag in tags]
        return int(sum(value for value in gigabytes if isinstance(value, int | float)) * 2**30)
