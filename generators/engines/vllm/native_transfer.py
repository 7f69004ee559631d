"""vLLM's own transfers of weights on CUDA: nccl and ipc. This process is what vLLM calls the trainer.

Invariants:

- A staged set stays where it came from, in host memory. On the device is no more of it than vLLM packs at once, and
  nothing afterwards.
- The device memory of a transfer is reserved before vLLM's weights are touched. Amid a transfer vLLM writes into the
  model, and an error leaves no weights to continue with.
- No thread that waits for vLLM delays the end of this process.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
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

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.vllm.weight_senders import WeightSender
from rollmesh.mesh.errors import ConfigError, WeightsError

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_LOCAL = "127.0.0.1"
# Least size of the buffers in which tensors are packed.
_PACK_BYTES = 256 << 20


class WeightUpdateCalls:
    """The engine as vLLM's trainers call it, from threads of their own; it answers in its event loop.

    Args:
        engine: with its loop running.
        loop: of the engine.

    Attributes:
        label: that the weights which are being sent will have.
    """

    def __init__(self, engine: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop
        self._calls: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._cancelled = False
        self.label = ""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._wait(self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info)))

    def start_weight_update(self) -> None:
        self._wait(self._engine.start_weight_update())

    def update_weights(self, update_info: WeightTransferUpdatePayload) -> None:
        self._wait(self._engine.update_weights(WeightTransferUpdateRequest(update_info)))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._wait(self._engine.finish_weight_update(weight_version or self.label))

    def cancel_calls(self) -> None:
        """Fails waiting calls and later ones, so that nothing waits for the engine any more."""
        with self._lock:
            self._cancelled = True
            calls = tuple(self._calls)
        for call in calls:
            call.cancel()

    def _wait(self, call: Coroutine[Any, Any, Any]) -> None:
        with self._lock:
            if self._cancelled:
                call.close()
                raise EngineError("the transfer of weights into vLLM was given up")
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
            self._calls.add(future)
        try:
            future.result()
        finally:
            with self._lock:
                self._calls.discard(future)


class StagedSource(WeightSource):
    """The set that is being sent, as vLLM's trainers read it: a tensor comes to the device when it is asked for.

    Args:
        device: that is sent from.

    Attributes:
        tensors: of the set, by checkpoint names.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.tensors: Mapping[str, torch.Tensor] = {}

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor."""
        return max((tensor.nbytes for tensor in self.tensors.values()), default=0)

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.tensors.items():
            yield name, tensor.contiguous().to(self._device)


class NativeSender(WeightSender):
    """`nccl` (a broadcast to the workers) or `ipc` (device memory that the worker maps).

    Args:
        device: that this process sends from.
        info: as vLLM's trainer expects it.
        in_flight: packed buffers that the trainer has at once.
    """

    def __init__(self, device: torch.device, info: TrainerInitInfo, *, in_flight: int) -> None:
        self._device = device
        self._info = info
        self._in_flight = in_flight
        self._source = StagedSource(device)
        self._client: WeightUpdateCalls | None = None
        self._trainer: Any = None

    async def connect(self, engine: AsyncLLM) -> None:
        self._client = client = WeightUpdateCalls(engine, asyncio.get_running_loop())
        self._trainer = await self._in_thread(
            lambda: WeightTransferTrainerFactory.trainer_init(self._info, client=client, source=self._source)
        )

    def stage(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        # No one writes to them any more (`InferenceEngine.update_weights`).
        return dict(tensors)

    def discard(self, staged: dict[str, torch.Tensor]) -> None:
        staged.clear()

    async def send(self, staged: dict[str, torch.Tensor], label: str) -> None:
        assert self._client is not None, "connected at the start"
        self._client.label = label
        await self._in_thread(lambda: self._send_staged(staged))

    def close(self) -> None:
        if self._client is not None:
            self._client.cancel_calls()
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            # A communicator without its other side may never become ready to end.
            _Thread(trainer.shutdown).start()

    def _send_staged(self, staged: dict[str, torch.Tensor]) -> None:
        self._source.tensors = staged
        try:
            largest, packed = self._source.largest, _PACK_BYTES
            if self._info.backend == "ipc":
                # It refuses tensors larger than its buffer. The workers do not know the size of that buffer.
                packed = self._trainer.packed_buffer_size_bytes = max(_PACK_BYTES, largest)
            # A tensor comes before the former one is released.
            self._reserve(self._in_flight * (packed + largest) + largest)
            self._trainer.send_weights()
        finally:
            self._source.tensors = {}
            # Memory that torch keeps for the next time is of no use to others on the device.
            torch.accelerator.empty_cache()

    def _reserve(self, nbytes: int) -> None:
        """Makes torch allocate `nbytes` of the device, and keep them for the transfer that follows.

        Raises:
            WeightsError: there is not as much; the former weights are in service.
        """
        try:
            torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            raise WeightsError(
                f"no {nbytes / 2**30:.1f} GiB on {self._device} to send new weights from: {error}",
                hint="lower rollout.vllm.gpu_memory_utilization, or use transfer: shm",
            ) from error

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        """Runs a blocking call in a thread that ends with this process at the latest.

        When cancelled, it abandons the thread; the thread's calls of the engine fail then.
        """

        def on_device() -> Any:
            # Each thread has a present device of its own.
            torch.accelerator.set_device_index(self._device)
            return call()

        thread = _Thread(on_device)
        thread.start()
        try:
            return await asyncio.wrap_future(thread.done)
        except asyncio.CancelledError:
            assert self._client is not None, "connected first"
            self._client.cancel_calls()
            raise


class _Thread(threading.Thread):
    """A call that the end of the interpreter does not wait for.

    Attributes:
        done: its result.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True, name="rollmesh-vllm-weights")
        self._call = call
        self.done: Future[Any] = Future()

    def run(self) -> None:
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            result = self._call()
        except BaseException as error:  # noqa: BLE001 - raised again where the future is awaited
            self.done.set_exception(error)
        else:
            self.done.set_result(result)


def native_sender(transfer: str, device: torch.device, workers: int) -> NativeSender:
    """The sender of `rollout.vllm.transfer`: nccl or ipc.

    Args:
        transfer: which.
        device: first of vLLM's.
        workers: of vLLM, one device each, all on this host.

    Raises:
        ConfigError: there is no device for this process.
    """
    first = device.index or 0
    if transfer == "ipc":
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

        # vLLM writes the handles as Python objects, which its messages take only so.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        info = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=_PACK_BYTES)
        return NativeSender(torch.device("cuda", first), info, in_flight=1)
    here = first + workers
    if here >= torch.accelerator.device_count():
        raise ConfigError(
            f"rollout.vllm.transfer: {transfer} needs a device for the generator in addition to the {workers} of vLLM",
            hint="use ipc or shm",
        )
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    broadcast = NCCLTrainerInitInfo(_LOCAL, _free_port(), workers + 1, packed_buffer_size_bytes=_PACK_BYTES, rank=0)
    return NativeSender(torch.device("cuda", here), broadcast, in_flight=broadcast.packed_num_buffers + 1)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOCAL, 0))
        return int(probe.getsockname()[1])
