"""Full tensors on the first rank, from shards, in bounded memory.

Tensors are gathered in batches. Shards are cast before they travel. Each rank packs its shards of a batch into one
message. The first rank receives the messages in turn, brings each to the host in one copy, and puts the rows in
their places. Its own message is one of them.

Invariants: in addition to the model, the first rank holds one batch of full tensors and one other rank's part of it. A
part is a batch divided by the number of ranks. Every other rank holds its own part of one batch. A batch exceeds
`gather_bytes` only where a single tensor does. No rank ever holds the model's full weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rollmesh.learner.engines.world import World
from rollmesh.mesh.weights.layout import aligned

GATHER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _GatherEntry:
    """A tensor of a batch: its shards, the dtype in which it travels, and its first byte, aligned for any dtype."""

    name: str
    tensor: Tensor
    dtype: torch.dtype
    start: int

    @property
    def row_bytes(self) -> int:
        return self.tensor.shape[1:].numel() * self.dtype.itemsize

    def rows(self, rank: int, ranks: int) -> tuple[int, int]:
        """First row and number of rows on a rank: as `torch.chunk` divides them."""
        total = self.tensor.shape[0]
        most = -(-total // ranks)
        first = min(rank * most, total)
        return first, min(most, total - first)


def full_tensors(
    named: Iterable[tuple[str, Tensor]], world: World, dtype: torch.dtype, gather_bytes: int = GATHER_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors on the CPU, on rank 0 alone; collective: the other ranks exhaust it too, and get nothing.

    Args:
        named: names and tensors, the same on all ranks; DTensors are sharded by rows over all ranks.
        world: the ranks.
        dtype: of floating-point tensors.
        gather_bytes: full bytes that are gathered at a time.

    Yields:
        Name and tensor, in order; the memory of a DTensor's is used again once the next is asked for.
    """
    gatherer = _Gatherer(world)
    batch: list[_GatherEntry] = []
    end = 0
    for name, tensor in named:
        wire_dtype = dtype if tensor.is_floating_point() else tensor.dtype
        if world.processes == 1 or not isinstance(tensor, DTensor):
            yield from gatherer.gather(batch, end)
            batch, end = [], 0
            if world.process == 0:
                own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                yield name, own.detach().to("cpu", wire_dtype).contiguous()
            continue
        assert tuple(tensor.placements) == (Shard(0),), f"{name} is sharded as {tensor.placements}"
        nbytes = tensor.shape.numel() * wire_dtype.itemsize
        if batch and end + nbytes > gather_bytes:
            yield from gatherer.gather(batch, end)
            batch, end = [], 0
        batch.append(_GatherEntry(name, tensor, wire_dtype, end))
        end += aligned(nbytes)
    yield from gatherer.gather(batch, end)


class _Gatherer:
    """Gathers batch after batch; keeps its memory from one to the next."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._full = torch.empty(0, dtype=torch.uint8)
        self._message = torch.empty(0, dtype=torch.uint8, device=world.device)
        self._on_host = torch.empty(0, dtype=torch.uint8)

    def gather(self, entries: Sequence[_GatherEntry], nbytes: int) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one batch of `nbytes` bytes on rank 0; nothing elsewhere."""
        rank, ranks = self._world.process, self._world.processes
        if not entries:
            return
        if rank:
            message = self._pack_message(entries)
            if len(message):
                dist.send(message, 0)
            return
        if len(self._full) < nbytes:
            self._full = torch.empty(0, dtype=torch.uint8)
            self._full = torch.empty(nbytes, dtype=torch.uint8)
        for source in range(ranks):
            message = (
                self._pack_message(entries) if source == 0 else self._reserve(_message_bytes(entries, source, ranks))
            )
            if source and len(message):
                dist.recv(message, source)
            for entry, part in _parts(entries, self._to_host(message), source, ranks):
                start = entry.start + entry.rows(source, ranks)[0] * entry.row_bytes
                self._full[start : start + len(part)].copy_(part)
        for entry in entries:
            data = self._full[entry.start : entry.start + entry.tensor.shape.numel() * entry.dtype.itemsize]
            yield entry.name, data.view(entry.dtype).view(entry.tensor.shape)

    def _pack_message(self, entries: Sequence[_GatherEntry]) -> Tensor:
        """Packs this rank's message."""
        rank, ranks = self._world.process, self._world.processes
        message = self._reserve(_message_bytes(entries, rank, ranks))
        for entry, part in _parts(entries, message, rank, ranks):
            part.view(entry.dtype).copy_(_local(entry))
        return message

    def _to_host(self, message: Tensor) -> Tensor:
        """Copies a message to host memory, valid until the next one."""
        if message.device.type == "cpu":
            return message
        if len(self._on_host) < len(message):
            self._on_host = torch.empty(0, dtype=torch.uint8)
            self._on_host = torch.empty(len(message), dtype=torch.uint8, pin_memory=True)
        return self._on_host[: len(message)].copy_(message)

    def _reserve(self, nbytes: int) -> Tensor:
        if len(self._message) < nbytes:
            # Frees the old memory before it allocates the new.
            self._message = torch.empty(0, dtype=torch.uint8, device=self._world.device)
            self._message = torch.empty(nbytes, dtype=torch.uint8, device=self._world.device)
        return self._message[:nbytes]


def _message_bytes(entries: Sequence[_GatherEntry], rank: int, ranks: int) -> int:
    return sum(aligned(entry.rows(rank, ranks)[1] * entry.row_bytes) for entry in entries)


def _parts(
    entries: Sequence[_GatherEntry], message: Tensor, rank: int, ranks: int
) -> Iterator[tuple[_GatherEntry, Tensor]]:
    """Each tensor with its rows in the message of a rank."""
    start = 0
    for entry in entries:
        length = entry.rows(rank, ranks)[1] * entry.row_bytes
        yield entry, message[start : start + length]
        start += aligned(length)


def _local(entry: _GatherEntry) -> Tensor:
    """This rank's rows, flat, in the dtype of the model."""
    assert isinstance(entry.tensor, DTensor)
    return entry.tensor.to_local().detach().reshape(-1)
