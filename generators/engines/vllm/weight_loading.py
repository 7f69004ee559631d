"""Weights and adapters: staged in any thread while jobs run, loaded while vLLM is paused."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

import torch

from rollmesh.generators.engines.adapters import AdapterWeights
from rollmesh.generators.engines.checkpoint_names import CheckpointLayout
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.external.adapter_folders import AdapterFolders
from rollmesh.generators.engines.external.served_adapters import ServedAdapters, StagedAdapter
from rollmesh.generators.engines.types import EngineSettings, WakeStep
from rollmesh.generators.engines.vllm.device_memory import DeviceMemory
from rollmesh.generators.engines.vllm.engine_args import on_cpu, section_of
from rollmesh.generators.engines.vllm.jobs.running_jobs import RunningJobs
from rollmesh.generators.engines.vllm.running_engine import SWAP_S, RunningEngine
from rollmesh.generators.engines.vllm.shared_weights import SharedWeights
from rollmesh.generators.engines.vllm.weight_senders import WeightSender, load_adapter
from rollmesh.generators.engines.vllm.worker import PLAIN_BYTES
from rollmesh.mesh.errors import WeightsError

log = logging.getLogger(__name__)


class WeightLoading:
    """The weights of one engine.

    Args:
        engine: that serves them.
        settings: see there.
        checkpoint: names and shapes of the model's tensors.
        sender: to its workers, connected.
        jobs: that run under them.
        memory: of its devices.
        adapters: of the engine.
        has_images: the model takes images.
    """

    def __init__(
        self,
        engine: RunningEngine,
        settings: EngineSettings,
        *,
        checkpoint: CheckpointLayout,
        sender: WeightSender,
        jobs: RunningJobs,
        memory: DeviceMemory,
        adapters: ServedAdapters,
        has_images: bool,
    ) -> None:
        self._engine, self._settings = engine, settings
        self._checkpoint, self._sender = checkpoint, sender
        self._jobs, self._memory = jobs, memory
        self._adapters = adapters
        self._folders = AdapterFolders()
        self._has_images = has_images

    def stage(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """See `Backend.stage`."""
        return self._sender.stage(self._checkpoint.to_checkpoint(tensors))

    def stage_adapter(self, adapter: AdapterWeights) -> StagedAdapter:
        """See `Backend.stage_adapter`."""
        return self._adapters.stage(adapter, form=self._folders.write, stage_base=self.stage)

    def discard(self, staged: Any) -> None:
        """See `Backend.discard`."""
        if isinstance(staged, StagedAdapter):
            staged.form.discard()
            staged = staged.base
        if staged is not None:
            self._sender.discard(staged)

    async def load(self, staged: Any, label: str, *, recompute: bool) -> None:
        """See `Backend.load`."""
        if isinstance(staged, StagedAdapter):
            await self._load_adapter(staged, label)
        else:
            await self._load_whole(staged, label, recompute=recompute)

    async def forget(self) -> None:
        """Gives weights and adapters up: their memory is gone, and no job runs."""
        self._sender.forget()
        for adapter in self._adapters.take_all():
            await self._engine.answer(self._engine.llm.remove_lora(adapter.number))

    def close(self) -> None:
        """Removes the folders of adapters."""
        self._folders.close()

    async def _load_adapter(self, staged: StagedAdapter, label: str) -> None:
        await self._adapters.install(
            staged,
            label,
            stage_base=self.stage,
            load_base=lambda base: self._load_whole(base, label, recompute=True),
            load=lambda adapter: load_adapter(self._engine.llm, self._adapters, adapter, self._engine.answer),
        )
        self._jobs.label = label

    async def _load_whole(self, staged: Any, label: str, *, recompute: bool) -> None:
        try:
            await self._memory.wake(WakeStep.WEIGHTS)
            await self._engine.answer(self._sender.send(staged, label), SWAP_S)
            if on_cpu(self._settings) and not self._jobs.label:
                await self._log_copies(staged)
            self._jobs.label = label
            await self._reset_caches(recompute=recompute)
        except (WeightsError, EngineError):
            raise
        except Exception as error:  # vLLM raises errors of its workers as they come
            raise EngineError(f"vLLM could not load weights, and has none now: {error}", hint="see its log") from error
        finally:
            self._sender.discard(staged)

    async def _reset_caches(self, *, recompute: bool) -> None:
        """Resets caches: no prefix finds a KV cache of previous weights, and no image their features."""
        if self._has_images:
            await self._engine.answer(self._engine.llm.reset_encoder_cache())
        if not (section_of(self._settings).prefix_caching or self._has_images or recompute):
            return
        # The blocks of running jobs stay, under the salt of previous weights.
        await self._engine.answer(self._engine.llm.reset_prefix_cache(reset_running_requests=recompute))
        if not recompute:
            await self._jobs.submit_again()

    async def _log_copies(self, staged: SharedWeights) -> None:
        """Logs which copies of the weights there are: the learner's file cannot serve where kernels pack them."""
        plain = await self._memory.sum_over_workers(PLAIN_BYTES)
        item = getattr(torch, self._settings.dtype).itemsize
        whole = sum(math.prod(shape) for shape in staged.layout.shapes) * item
        log.info(
            "weights come through %s; vLLM has %d MiB of them as they are, and its kernels keep a packed copy of the "
            "linear layers, %d MiB",
            staged.origin,
            plain >> 20,
            max(0, whole - plain) >> 20,
        )
