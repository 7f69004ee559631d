"""The learner's processes: their process group, and the few collectives that engines and learner need.

All engines of a process share the group, whatever their layouts: the first that needs it forms it, the last that needed
it ends it. One process needs none. Else it is gloo on CPU and nccl on CUDA. Every group that is made here gives each
collective the same deadline; torch's own default for further groups is another one (gloo: 30 min). Processes meet as
`learner.engines.rendezvous` says; torch calls their numbers ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from rollmesh.learner.engines.rendezvous import open_store

Made = TypeVar("Made")


def gather_bytes(message: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Every process's message over a gloo group, in the order of the processes; collective.

    Args:
        message: of this one; they may differ in length and be empty.
        group: of a thread of its own; the group of the thread that trains has `World.gather_bytes`.
    """
    lengths = list(torch.zeros(group.size(), 1, dtype=torch.int64))
    dist.all_gather(lengths, torch.tensor([len(message)]), group=group)
    longest = max(1, *(int(length) for length in lengths))
    padded = torch.frombuffer(bytearray(message.ljust(longest, b"\0")), dtype=torch.uint8)
    messages = list(torch.empty(len(lengths), longest, dtype=torch.uint8))
    dist.all_gather(messages, padded, group=group)
    return [found[: int(length)].numpy().tobytes() for found, length in zip(messages, lengths, strict=True)]


class World:
    """This process among all of the learner's.

    Args:
        device_type: `cpu` or `cuda`.
        need_group: form a process group also for a single process.
        timeout_s: deadline of each collective.

    Attributes:
        process, processes: the number of this one, and how many there are.
        device: of this process.
        timeout: deadline of each collective, also for further groups.
        first: no other world was open in this process when this one was made.
    """

    # A process group belongs to the process, and so does the set of its users.
    _open: ClassVar[WeakSet[World]] = WeakSet()
    _formed: ClassVar[bool] = False
    _neighbours: ClassVar[dict[int, dist.ProcessGroup]] = {}
    _counterparts: ClassVar[dict[int, dist.ProcessGroup]] = {}
    # Things that engines have made of groups.
    _kept: ClassVar[dict[Hashable, Any]] = {}
    # Groups of threads that have ended, for the next ones.
    _spare: ClassVar[list[dist.ProcessGroup]] = []

    def __init__(self, device_type: str, *, need_group: bool, timeout_s: float = 600.0) -> None:
        self.timeout = timedelta(seconds=timeout_s)
        self.processes = int(os.environ.get("WORLD_SIZE", "1"))
        self.process = int(os.environ.get("RANK", "0"))
        self.device = torch.device(device_type)
        if device_type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
        self._needs_group = self.processes > 1 or need_group
        if self._needs_group and not dist.is_initialized():
            backend = "nccl" if device_type == "cuda" else "gloo"
            dist.init_process_group(
                backend,
                timeout=self.timeout,
                rank=self.process,
                world_size=self.processes,
                store=open_store(self.timeout),
            )
            World._formed = True
        self.first = not World._open
        World._open.add(self)

    def sum(self, values: Tensor) -> Tensor:
        """Element-wise sum over the processes."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Element-wise maximum over the processes."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def max_int(self, value: int) -> int:
        """The largest of the processes' numbers."""
        return self.max_ints([value])[0]

    def max_ints(self, values: Sequence[int]) -> list[int]:
        """The largest of the processes' numbers, place by place."""
        return list(values) if self.processes == 1 else [int(most) for most in self.max(torch.tensor(values)).tolist()]

    def sum_ints(self, values: Sequence[int]) -> list[int]:
        """Sums of the processes' numbers."""
        return (
            list(values) if self.processes == 1 else [int(total) for total in self.sum(torch.tensor(values)).tolist()]
        )

    def gather(self, values: Tensor) -> list[Tensor]:
        """Every process's values on this one's device, in the order of the processes.

        Args:
            values: [N], of one dtype everywhere; N may differ and may be 0.
        """
        values = values.to(self.device)
        if self.processes == 1:
            return [values]
        lengths = values.new_zeros(self.processes, dtype=torch.int64)
        lengths[self.process] = values.numel()
        sizes = [int(length) for length in self.sum(lengths).tolist()]
        longest = max(sizes)
        if not longest:
            return [values] * self.processes
        # Bytes travel whatever the dtype: backends differ in the types they know.
        padded = functional.pad(values.contiguous().view(torch.uint8), (0, (longest - len(values)) * values.itemsize))
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded)
        return [part.view(values.dtype)[:size] for part, size in zip(parts, sizes, strict=True)]

    def broadcast(self, values: Tensor) -> Tensor:
        """The leader's values on this process's device.

        Args:
            values: of one shape and dtype everywhere; only the leader's are read.
        """
        values = values.to(self.device)
        if self.processes > 1 and values.numel():
            values = values.contiguous()
            dist.broadcast(values.view(torch.uint8), src=0)
        return values

    def gather_bytes(self, message: bytes) -> list[bytes]:
        """Every process's message, in the order of the processes; they may differ in length and be empty."""
        sent = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.zeros(0, dtype=torch.uint8)
        return [part.cpu().numpy().tobytes() for part in self.gather(sent)]

    def gather_failures(self, failed: Exception | None, reason: str) -> list[str]:
        """Every process's reason for failing, in the order of the processes; empty where it did not fail.

        Args:
            failed: the error of this process; None: it did not fail. The others may still wait inside a collective
                that this process has left. Then they cannot answer, and this error is the cause of the one raised.
            reason: its text; empty without an error.
        """
        try:
            return [theirs.decode() for theirs in self.gather_bytes(reason.encode())]
        except Exception as lost:
            raise lost from failed

    def neighbours(self, size: int) -> dist.ProcessGroup:
        """The process group of this process and its neighbours; collective over all processes.

        Args:
            size: processes in it; divides the number of all. Their numbers follow one another.
        """
        if size not in World._neighbours:
            World._neighbours[size] = dist.new_subgroups(size, timeout=self.timeout)[0]
        return World._neighbours[size]

    def counterparts(self, size: int) -> dist.ProcessGroup:
        """The process group of those that have this process's place among their neighbours; collective over all.

        Args:
            size: of each run of neighbours.
        """
        if size not in World._counterparts:
            ranks = [list(range(place, self.processes, size)) for place in range(size)]
            World._counterparts[size] = dist.new_subgroups_by_enumeration(ranks, timeout=self.timeout)[0]
        return World._counterparts[size]

    def keep(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """Makes something of process groups once, for all engines that ask for it with this key.

        Args:
            key: of what is made.
            make: makes it, where it is not there yet; collective.

        Returns:
            It is kept as long as the learner's own group.
        """
        if key not in World._kept:
            World._kept[key] = make()
        made: Made = World._kept[key]
        return made

    def lend_group(self) -> dist.ProcessGroup | None:
        """A gloo group of all processes for one thread that does not train; collective. None: no group is formed.

        The collectives of such a thread must not come between those of the thread that trains.
        """
        if not dist.is_initialized():
            return None
        return World._spare.pop() if World._spare else dist.new_group(backend="gloo", timeout=self.timeout)

    def take_back(self, group: dist.ProcessGroup) -> None:
        """Keeps a group that was lent for the next thread: every process in the same order, with nothing under way."""
        World._spare.append(group)

    def barrier(self) -> None:
        """Waits until every process is here."""
        if self.processes > 1:
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
            World._neighbours.clear()
            World._counterparts.clear()
            World._kept.clear()
            World._spare.clear()

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.processes == 1:
            return values
        reduced = values.to(self.device, copy=True)
        dist.all_reduce(reduced, operation)
        return reduced
