"""CUDA memory that other processes on the same device open: for a learner and generators that share a GPU.

Invariants: a version's block is whole before it is offered, and stays until it is retired, whoever has it open; a
receiver that is in the middle of a block that goes reads bytes of something else, and its digests say so.

Each kept version takes its full size of the device's memory.
"""

from __future__ import annotations

import logging

import torch

from learner.weights.offers.base import Offer
from learner.weights.published import PublishedVersion
from mesh.errors import WeightsError
from mesh.hosts import host_id
from mesh.versions import PolicyVersion
from mesh.weights.broadcast import Staging
from mesh.weights.cuda_handle import CudaHandle
from protos import weights_pb2

log = logging.getLogger(__name__)


class CudaIpc(Offer):
    """Copies versions to this process's CUDA device and shares them.

    Raises:
        WeightsError: there is no CUDA device.
    """

    name = "cuda_ipc"

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise WeightsError(
                "weights.transport is cuda_ipc, but there is no CUDA device here", hint="set weights.transport: auto"
            )
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._host_id = host_id()
        self._blocks: dict[PolicyVersion, torch.Tensor] = {}

    def offer(self, version: PublishedVersion) -> weights_pb2.Offer | None:
        """See Offer; None where memory does not suffice, or cannot be shared."""
        try:
            block = torch.empty(version.data.nbytes, dtype=torch.uint8, device=self._device)
            staging = Staging(self._device, max(bucket.nbytes for bucket in version.manifest.buckets))
            for index, start in enumerate(version.starts[:-1]):
                bucket = version.bucket(index)
                block[start : start + len(bucket)].copy_(staging.put(index, bucket))
            torch.cuda.current_stream(self._device).synchronize()
            handle = share(block)
        # torch says RuntimeError where it means memory of either side, or that it cannot be shared.
        except RuntimeError as error:
            log.warning("version %s is not on the GPU, generators get it over grpc: %s", version.policy, error)
            return None
        self._blocks[version.policy] = block
        return weights_pb2.Offer(transport=self.name, address=handle.address(), host_id=self._host_id)

    def retire(self, version: PublishedVersion) -> None:
        """See Offer."""
        self._blocks.pop(version.policy, None)


def share(block: torch.Tensor) -> CudaHandle:
    """Makes a block on a CUDA device known to other processes."""
    # torch has no public name for this; torch.multiprocessing.reductions uses the same, around pickle.
    device, memory, nbytes, offset, counter, counter_offset, event, needed = block.untyped_storage()._share_cuda_()
    # torch counts one receiver and would keep the block until that one is done. Here any number comes, or none.
    torch.UntypedStorage._release_ipc_counter(counter, counter_offset, device=device)
    uuid = str(torch.cuda.get_device_properties(block.device).uuid)
    return CudaHandle(uuid, memory.hex(), nbytes, offset, counter.hex(), counter_offset, event.hex(), bool(needed))
