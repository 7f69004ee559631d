"""The process group of the learner's ranks, and the few collectives the engines need.

One rank needs no group. Else it is gloo on CPU and nccl on CUDA; every collective has a deadline. Ranks of one machine
(`mesh.runtime.ranks`) meet in a file and listen on its loopback interface alone; others meet by torchrun's environment.
The engines of a process share one group: the first that needs it forms it, the last that needed it ends it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import ClassVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from rollmesh.mesh.runtime.ranks import MEETING, on_loopback

_TIMEOUT = timedelta(minutes=10)


class World:
    """This process among the ranks.

    Args:
        device_type: `cpu` or `cuda`.
        need_group: form a process group also for a single rank.

    Attributes:
        first: no other world was open in this process when this one was made.
    """

    # A process group belongs to the process, and so does the set of its users.
    _open: ClassVar[WeakSet[World]] = WeakSet()
    _formed: ClassVar[bool] = False

    def __init__(self, device_type: str, *, need_group: bool) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.device = torch.device(device_type)
        if device_type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
        self._needs_group = self.size > 1 or need_group
        if self._needs_group and not dist.is_initialized():
            backend = "nccl" if device_type == "cuda" else "gloo"
            store = _meeting_of(self.size)
            if store is not None:
                os.environ.update(on_loopback())
            dist.init_process_group(backend, timeout=_TIMEOUT, rank=self.rank, world_size=self.size, store=store)
            World._formed = True
        self.first = not World._open
        World._open.add(self)

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Element-wise maximum over ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def max_int(self, value: int) -> int:
        """The largest of the ranks' numbers."""
        return value if self.size == 1 else int(self.max(torch.tensor([value])))

    def sum_ints(self, values: Sequence[int]) -> list[int]:
        """Sums of the ranks' numbers."""
        return list(values) if self.size == 1 else [int(total) for total in self.sum(torch.tensor(values)).tolist()]

    def gather(self, values: Tensor) -> list[Tensor]:
        """Every rank's values [N] on this rank's device, in the order of the ranks; N may differ."""
        values = values.to(self.device)
        if self.size == 1:
            return [values]
        lengths = values.new_zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = values.numel()
        sizes = [int(length) for length in self.sum(lengths).tolist()]
        longest = max(sizes)
        if not longest:
            return [values] * self.size
        # Bytes travel whatever the dtype: backends differ in the types they know.
        padded = functional.pad(values.contiguous().view(torch.uint8), (0, (longest - len(values)) * values.itemsize))
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return [part.view(values.dtype)[:size] for part, size in zip(parts, sizes, strict=True)]

    def broadcast(self, values: Tensor) -> Tensor:
        """Rank 0's values on this rank's device; shape and dtype are the same on all ranks."""
        values = values.to(self.device)
        if self.size > 1 and values.numel():
            values = values.contiguous()
            dist.broadcast(values.view(torch.uint8), src=0)
        return values

    def gather_bytes(self, message: bytes) -> list[bytes]:
        """Every rank's message, in the order of the ranks."""
        sent = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.zeros(0, dtype=torch.uint8)
        return [part.cpu().numpy().tobytes() for part in self.gather(sent)]

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leaves the process group; collective where it is the last to leave. Repeating it is harmless."""
        if self not in World._open:
            return
        World._open.discard(self)
        if World._formed and self._needs_group and not any(other._needs_group for other in World._open):
            self.barrier()
            dist.destroy_process_group()
            World._formed = False

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size == 1:
            return values
        reduced = values.to(self.device, copy=True)
        dist.all_reduce(reduced, operation)
        return reduced


def _meeting_of(size: int) -> dist.Store | None:
    """The file in which the ranks of this machine meet; None: the others may be elsewhere."""
    if size == 1:
        return dist.HashStore()
    if MEETING not in os.environ:
        return None
    store = dist.FileStore(os.environ[MEETING], size)
    store.set_timeout(_TIMEOUT)
    return store
