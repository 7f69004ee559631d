"""Full tensors on the first rank, from shards, in bounded memory.

Invariant: besides the model, the first rank holds one bucket of full tensors and the part of it that one other rank
sends (a bucket over the number of ranks); every other rank holds its own part of one bucket. A bucket exceeds
`bucket_bytes` only where a single tensor does. No rank ever holds the model's full weights.

Shards are cast before they travel. Each rank packs its shards of a bucket into one message; the first takes the
messages in turn, its own too, brings each to the host in one copy, and puts the rows in their places.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rollmesh.learner.engines.fsdp2.world import World

BUCKET_BYTES = 64 << 20
# Tensors in a bucket and parts of a message begin at multiples of this: bytes can be seen as elements of any dtype.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor in a bucket: its shards, the dtype in which it travels, and its first byte."""

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
    named: Iterable[tuple[str, Tensor]], world: World, dtype: torch.dtype, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors on the CPU, on rank 0 alone; collective: the other ranks exhaust it too, and get nothing.

    Args:
        named: names and tensors, the same on all ranks; DTensors are sharded by rows over all ranks.
        world: the ranks.
        dtype: of floating-point tensors.
        bucket_bytes: full bytes that are gathered at a time.

    Yields:
        Name and tensor, in order; the memory of a DTensor's is used again once the next is asked for.
    """
    gatherer = _Gatherer(world)
    bucket: list[_Place] = []
    end = 0
    for name, tensor in named:
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        if world.size == 1 or not isinstance(tensor, DTensor):
            yield from gatherer.gather(bucket, end)
            bucket, end = [], 0
            if world.rank == 0:
                own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                yield name, own.detach().to("cpu", wanted).contiguous()
            continue
        assert tuple(tensor.placements) == (Shard(0),), f"{name} is sharded as {tensor.placements}"
        nbytes = tensor.shape.numel() * wanted.itemsize
        if bucket and end + nbytes > bucket_bytes:
            yield from gatherer.gather(bucket, end)
            bucket, end = [], 0
        bucket.append(_Place(name, tensor, wanted, end))
        end += _aligned(nbytes)
    yield from gatherer.gather(bucket, end)


class _Gatherer:
    """Gathers bucket after bucket; keeps its memory from one to the next."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._bucket = torch.empty(0, dtype=torch.uint8)
        self._message = torch.empty(0, dtype=torch.uint8, device=world.device)
        self._on_host = torch.empty(0, dtype=torch.uint8)

    def gather(self, places: Sequence[_Place], nbytes: int) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one bucket of `nbytes` bytes on rank 0; nothing elsewhere."""
        rank, ranks = self._world.rank, self._world.size
        if not places:
            return
        if rank:
            message = self._packed(places)
            if len(message):
                dist.send(message, 0)
            return
        if len(self._bucket) < nbytes:
            self._bucket = torch.empty(0, dtype=torch.uint8)
            self._bucket = torch.empty(nbytes, dtype=torch.uint8)
        for source in range(ranks):
            message = self._packed(places) if source == 0 else self._room(_message_bytes(places, source, ranks))
            if source and len(message):
                dist.recv(message, source)
            for place, part in _parts(places, self._fetched(message), source, ranks):
                start = place.start + place.rows(source, ranks)[0] * place.row_bytes
                self._bucket[start : start + len(part)].copy_(part)
        for place in places:
            data = self._bucket[place.start : place.start + place.tensor.shape.numel() * place.dtype.itemsize]
            yield place.name, data.view(place.dtype).view(place.tensor.shape)

    def _packed(self, places: Sequence[_Place]) -> Tensor:
        """This rank's message."""
        rank, ranks = self._world.rank, self._world.size
        message = self._room(_message_bytes(places, rank, ranks))
        for place, part in _parts(places, message, rank, ranks):
            part.view(place.dtype).copy_(_local(place))
        return message

    def _fetched(self, message: Tensor) -> Tensor:
        """A message in host memory, until the next one."""
        if message.device.type == "cpu":
            return message
        if len(self._on_host) < len(message):
            self._on_host = torch.empty(0, dtype=torch.uint8)
            self._on_host = torch.empty(len(message), dtype=torch.uint8, pin_memory=True)
        return self._on_host[: len(message)].copy_(message)

    def _room(self, nbytes: int) -> Tensor:
        if len(self._message) < nbytes:
            # The old memory goes before the new comes.
            self._message = torch.empty(0, dtype=torch.uint8, device=self._world.device)
            self._message = torch.empty(nbytes, dtype=torch.uint8, device=self._world.device)
        return self._message[:nbytes]


def _message_bytes(places: Sequence[_Place], rank: int, ranks: int) -> int:
    return sum(_aligned(place.rows(rank, ranks)[1] * place.row_bytes) for place in places)


def _parts(places: Sequence[_Place], message: Tensor, rank: int, ranks: int) -> Iterator[tuple[_Place, Tensor]]:
    """Where each tensor's rows lie in the message of a rank."""
    start = 0
    for place in places:
        length = place.rows(rank, ranks)[1] * place.row_bytes
        yield place, message[start : start + length]
        start += _aligned(length)


def _local(place: _Place) -> Tensor:
    """This rank's rows, flat, in the dtype of the model."""
    assert isinstance(place.tensor, DTensor)
    return place.tensor.to_local().detach().reshape(-1)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
