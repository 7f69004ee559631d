"""vLLM's own ways of the weights on CUDA: nccl, ipc and sparse. This process is what vLLM calls the trainer.

They write into the model as they go: an error amid a transfer leaves no weights to go on with.
"""

from __future__ import annotations

import asyncio
import os
import socket
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerInitInfo,
    WeightSource,
    WeightTransferInitRequest,
    WeightTransferUpdatePayload,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from generators.engines.vllm.senders import Sender
from mesh.errors import ConfigError, WeightsError

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseWeightPatch
    from vllm.v1.engine.async_llm import AsyncLLM

_LOCAL = "127.0.0.1"
# Of the buffers in which ipc and nccl pack tensors.
_PACK_BYTES = 256 << 20
# Flat positions in a tensor travel as 32-bit numbers.
_LARGEST_SPARSE = 2**31


class EngineClient:
    """What vLLM's trainers call, from a thread of their own, answered by the engine in its event loop.

    Args:
        engine: with its loop running.
        loop: of the engine.

    Attributes:
        label: that the weights which are being sent will have.
    """

    def __init__(self, engine: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop
        self.label = ""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._wait(self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info)))

    def start_weight_update(self) -> None:
        self._wait(self._engine.start_weight_update())

    def update_weights(self, update_info: WeightTransferUpdatePayload) -> None:
        self._wait(self._engine.update_weights(WeightTransferUpdateRequest(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._wait(self._engine.finish_weight_update(weight_version or self.label))

    def _wait(self, call: Any) -> None:
        asyncio.run_coroutine_threadsafe(call, self._loop).result()


class StagedSource(WeightSource):
    """The set that is being sent, as vLLM's trainers read it.

    Attributes:
        tensors: of the set, by checkpoint names; on the sender's device.
    """

    def __init__(self) -> None:
        self.tensors: Mapping[str, torch.Tensor] = {}

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()


class NativeSender(Sender):
    """One of vLLM's own, in whose trainer's place this process is.

    Args:
        device: that this process sends from.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._client: EngineClient | None = None
        self._trainer: Any = None

    async def connect(self, engine: AsyncLLM) -> None:
        self._client = EngineClient(engine, asyncio.get_running_loop())
        self._trainer = await asyncio.to_thread(self._on_device, self._meet, self._client)

    async def send(self, staged: Any, label: str) -> None:
        assert self._client is not None, "connected at the start"
        self._client.label = label
        await asyncio.to_thread(self._on_device, self._transmit, staged)

    def close(self) -> None:
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.shutdown()

    @abstractmethod
    def _meet(self, client: EngineClient) -> Any:
        """vLLM's trainer, connected with the workers."""

    @abstractmethod
    def _transmit(self, staged: Any) -> None:
        """One whole update, from start to finish."""

    def _on_device(self, call: Any, *arguments: Any) -> Any:
        # Of each thread its own.
        torch.accelerator.set_device_index(self._device)
        return call(*arguments)

    def _placed(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies on the sender's device, beside what the engine does there.

        Raises:
            WeightsError: there is no memory for them.
        """
        try:
            placed = {name: tensor.to(self._device).contiguous() for name, tensor in tensors.items()}
            torch.accelerator.synchronize(self._device)
        except (RuntimeError, MemoryError) as error:
            raise WeightsError(
                f"no memory on {self._device} for new weights: {error}", hint="lower gpu_memory_utilization, or use shm"
            ) from error
        return placed


class FullSender(NativeSender):
    """`nccl` (a broadcast to the workers) and `ipc` (device memory that the worker maps): whole sets.

    Args:
        device: see `NativeSender`.
        info: as vLLM's trainer wants it.
    """

    def __init__(self, device: torch.device, info: TrainerInitInfo) -> None:
        super().__init__(device)
        self._info = info
        self._source = StagedSource()

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self._placed(tensors)

    def discard(self, staged: dict[str, torch.Tensor]) -> None:
        staged.clear()

    def _meet(self, client: EngineClient) -> Any:
        return WeightTransferTrainerFactory.trainer_init(self._info, client=client, source=self._source)

    def _transmit(self, staged: dict[str, torch.Tensor]) -> None:
        self._source.tensors = staged
        try:
            self._trainer.send_weights()
        finally:
            self._source.tensors = {}


class SparseSender(NativeSender):
    """`sparse`: of each tensor only what has changed since the version before, which is kept on the host for that.

    Args:
        device: see `NativeSender`.
        info: as vLLM's trainer wants it.
    """

    def __init__(self, device: torch.device, info: TrainerInitInfo) -> None:
        super().__init__(device)
        self._info = info
        self._sent: dict[str, torch.Tensor] = {}

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, tensor in tensors.items():
            if tensor.numel() >= _LARGEST_SPARSE:
                raise WeightsError(f"tensor {name!r} is too large for sparse transfer", hint="use shm or nccl")
        # Against what will have been sent by then is decided when it is sent.
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}

    def discard(self, staged: dict[str, torch.Tensor]) -> None:
        staged.clear()

    def forget(self) -> None:
        self._sent = {}

    def _meet(self, client: EngineClient) -> Any:
        return WeightTransferTrainerFactory.trainer_init(self._info, client=client)

    def _transmit(self, staged: dict[str, torch.Tensor]) -> None:
        patches = [self._patch(name, tensor) for name, tensor in staged.items()]
        patches = [patch for patch in patches if patch.indices.numel()]
        if patches:
            self._trainer.send_weights(patches)
        assert self._client is not None, "connected at the start"
        if not patches:
            # vLLM's trainer does nothing at all then, and the version is new all the same.
            self._client.start_weight_update()
            self._client.finish_weight_update()
        self._sent = dict(staged)

    def _patch(self, name: str, tensor: torch.Tensor) -> SparseWeightPatch:
        from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseWeightPatch

        indices = changed(tensor, self._sent.get(name))
        values = tensor.reshape(-1)[indices.long()]
        return SparseWeightPatch(
            name, indices.to(self._device), values.to(self._device).contiguous(), tuple(tensor.shape)
        )


def changed(tensor: torch.Tensor, former: torch.Tensor | None) -> torch.Tensor:
    """Int32 flat positions at which two tensors differ in their bits; all where there is no former one."""
    if former is None:
        return torch.arange(tensor.numel(), dtype=torch.int32)
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    differs = tensor.reshape(-1).view(bits) != former.reshape(-1).view(bits)
    return differs.nonzero().reshape(-1).to(torch.int32)


def native_sender(transfer: str, device: torch.device, workers: int) -> NativeSender:
    """The sender of `rollout.vllm.transfer`: nccl, ipc or sparse.

    Args:
        transfer: which.
        device: first of vLLM's.
        workers: of vLLM, one device each.

    Raises:
        ConfigError: there is no device for this process.
    """
    first = device.index or 0
    if transfer == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        # vLLM writes the handles as Python objects, which its messages take only so.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        info = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=_PACK_BYTES)
        return FullSender(torch.device("cuda", first), info)
    here = first + workers
    if here >= torch.accelerator.device_count():
        raise ConfigError(
            f"rollout.vllm.transfer: {transfer} needs a device for the generator beside the {workers} of vLLM",
            hint="use ipc or shm",
        )
    mine = torch.device("cuda", here)
    if transfer == "sparse":
        from vllm.distributed.weight_transfer.sparse_nccl_engine import SparseNCCLTrainerInitInfo

        return SparseSender(mine, SparseNCCLTrainerInitInfo(_LOCAL, _free_port(), workers + 1, rank=0))
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    broadcast = NCCLTrainerInitInfo(_LOCAL, _free_port(), workers + 1, packed_buffer_size_bytes=_PACK_BYTES, rank=0)
    return FullSender(mine, broadcast)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOCAL, 0))
        return int(probe.getsockname()[1])
