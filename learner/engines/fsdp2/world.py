"""The process group of the learner's ranks, and the few collectives the engine needs.

One rank needs no group. Under torchrun the group is gloo on CPU and nccl on CUDA; every collective has a deadline.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_TIMEOUT = timedelta(minutes=10)


class World:
    """This process among the ranks.

    Args:
        device_type: `cpu` or `cuda`.
        need_group: form a process group also for a single rank.
    """

    def __init__(self, device_type: str, *, need_group: bool) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.device = torch.device(device_type)
        if device_type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
        self._owns_group = (self.size > 1 or need_group) and not dist.is_initialized()
        if self._owns_group:
            backend = "nccl" if device_type == "cuda" else "gloo"
            store = dist.HashStore() if self.size == 1 else None
            dist.init_process_group(backend, timeout=_TIMEOUT, rank=self.rank, world_size=self.size, store=store)

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

    def barrier(self) -> None:
        """Waits until every rank is here."""
        if self.size > 1:
            dist.barrier()

    def close(self) -> None:
        """Leaves the process group, if it was formed here; collective."""
        if self._owns_group and dist.is_initialized():
            self.barrier()
            dist.destroy_process_group()
            self._owns_group = False

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size == 1:
            return values
        reduced = values.to(self.device, copy=True)
        dist.all_reduce(reduced, operation)
        return reduced
