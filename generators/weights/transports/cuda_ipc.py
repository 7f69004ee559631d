"""The learner's CUDA memory, opened by a generator on the same device; copied from there to the host, and verified."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from generators.weights.memory import fresh
from generators.weights.transports.base import Fetch, Received, Transport
from mesh.errors import WeightsError
from mesh.weights import Wanted
from mesh.weights.cuda_handle import CudaHandle

if TYPE_CHECKING:
    import torch


class CudaIpc(Transport):
    """Opens blocks of a learner on this host.

    Args:
        host_id: of this process (`mesh.hosts`).
    """

    name = "cuda_ipc"

    def __init__(self, host_id: str) -> None:
        self._host_id = host_id

    def refusal(self, wanted: Wanted) -> str:
        """See Transport."""
        offer = wanted.offer(self.name)
        if offer is None:
            return "the learner offers no CUDA memory"
        if offer.host_id != self._host_id:
            return "the learner is on another host"
        try:
            handle = CudaHandle.from_address(offer.address)
        except WeightsError as error:
            return error.message
        if handle.nbytes < wanted.nbytes:
            return f"the learner's block has {handle.nbytes} bytes, {wanted.nbytes} were announced"
        return "" if _device_of(handle) is not None else "the learner's CUDA device is not visible here"

    async def receive(self, fetch: Fetch, arrived: Callable[[memoryview, int], None]) -> Received:
        """See Transport."""
        wanted = fetch.wanted
        offer = wanted.offer(self.name)
        assert offer is not None, "refusal() was asked before"
        block = await asyncio.to_thread(_open, CudaHandle.from_address(offer.address))
        data = fresh(wanted.nbytes)
        for index, start in enumerate(wanted.starts[:-1]):
            if fetch.superseded():
                raise WeightsError(f"{wanted.name(index)}: given up, another learner has announced its own weights")
            await asyncio.to_thread(_copy, block, start, wanted.part(data, index))
            arrived(data, index)
        return Received(data)


def _device_of(handle: CudaHandle) -> int | None:
    """This process's number of the device; None where it cannot see it."""
    import torch

    devices = range(torch.cuda.device_count())
    return next((n for n in devices if str(torch.cuda.get_device_properties(n).uuid) == handle.device), None)


def _open(handle: CudaHandle) -> torch.Tensor:
    import torch

    torch.cuda.init()
    try:
        # torch has no public name for this; torch.multiprocessing.reductions uses the same, around pickle.
        storage = torch.UntypedStorage._new_shared_cuda(
            _device_of(handle),
            bytes.fromhex(handle.block),
            handle.nbytes,
            handle.offset,
            bytes.fromhex(handle.counter),
            handle.counter_offset,
            bytes.fromhex(handle.event),
            handle.event_needed,
        )
    except RuntimeError as error:
        raise WeightsError(f"the learner's CUDA memory cannot be opened: {str(error).splitlines()[0]}") from error
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copy(block: torch.Tensor, start: int, target: memoryview) -> None:
    import torch

    if not target:
        return
    try:
        torch.frombuffer(target, dtype=torch.uint8).copy_(block[start : start + len(target)])
    except RuntimeError as error:
        raise WeightsError(f"the learner's CUDA memory cannot be read: {str(error).splitlines()[0]}") from error
