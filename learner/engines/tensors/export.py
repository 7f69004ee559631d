"""Full tensors from the boxes of processes, in bounded memory: each comes to one process, a holder.

Tensors are gathered in batches, and each batch goes to the holder that has received the fewest bytes so far. Batches of
different holders travel together, in a round. Every process casts its boxes and packs them into one message per
holder, and all exchange their messages piece by piece. A holder brings each piece to the host and puts the elements in
their places. Where there are several copies of a tensor, it gets them from the processes of its own.

Invariants: in addition to the model, a holder has one batch of full tensors on the host, and `gather_bytes` that
arrive. Every process has its own boxes of one round: less than `gather_bytes` and one message more. A batch exceeds
`gather_bytes` only where a single tensor does. No process ever holds the model's full weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from rollmesh.learner.engines.interface import ExportedTensor, WeightShard
from rollmesh.learner.engines.tensors.boxes import Box, box_shape, box_start, flattened, rectangles, shift
from rollmesh.learner.engines.tensors.divided_tensor import DividedTensor
from rollmesh.learner.engines.world import World
from rollmesh.mesh.weights.layout import aligned

GATHER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of a batch, the dtype in which it travels, and its first byte, aligned for any dtype."""

    tensor: DividedTensor
    dtype: torch.dtype
    start: int

    @property
    def nbytes(self) -> int:
        return prod(self.tensor.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Part:
    """The bytes of a box in a message.

    Attributes:
        entry: the box's tensor.
        number: of the box, among those of its process.
        box: in the full tensor.
        start, stop: its bytes in the message.
    """

    entry: _Entry
    number: int
    box: Box
    start: int
    stop: int

    def place(self, full: Tensor, piece: Tensor, first: int) -> None:
        """Puts what a piece of the message has of the box into the batch's bytes.

        Args:
            full: uint8, of the batch.
            piece: uint8, of the message.
            first: byte of the message with which the piece begins.
        """
        begin, end = max(self.start, first), min(self.stop, first + len(piece))
        if begin >= end:
            return
        size, entry = self.entry.dtype.itemsize, self.entry
        # Bytes are a last dimension, so that a piece may end anywhere.
        shape, box = flattened((*entry.tensor.shape, size), (*self.box, slice(0, size)))
        target, taken = full[entry.start : entry.start + entry.nbytes].view(shape), begin - first
        for rectangle in rectangles(box_shape(box), begin - self.start, end - self.start):
            sides = box_shape(rectangle)
            target[shift(rectangle, box_start(box))].copy_(piece[taken : taken + prod(sides)].view(sides))
            taken += prod(sides)


@dataclass(slots=True)
class _Batch:
    """Tensors for one holder, side by side."""

    entries: list[_Entry] = field(default_factory=list)
    nbytes: int = 0
    holder: int = 0

    def add(self, tensor: DividedTensor, dtype: torch.dtype) -> None:
        entry = _Entry(tensor, dtype, self.nbytes)
        self.entries.append(entry)
        self.nbytes += aligned(entry.nbytes)

    def parts(self, process: int) -> list[_Part]:
        """The boxes that a process sends to the holder, in the order of its message."""
        parts, start = [], 0
        for entry in self.entries:
            copy, boxes = entry.tensor.place(process)
            if copy != entry.tensor.place(self.holder)[0]:
                continue
            for number, box in enumerate(boxes):
                stop = start + prod(box_shape(box)) * entry.dtype.itemsize
                parts.append(_Part(entry, number, box, start, stop))
                start = aligned(stop)
        return parts

    def message_bytes(self, process: int) -> int:
        """Size of the message of a process to the holder."""
        parts = self.parts(process)
        return aligned(parts[-1].stop) if parts else 0


def full_tensors(
    tensors: Iterable[DividedTensor],
    world: World,
    dtype: torch.dtype,
    holders: Sequence[int] = (0,),
    gather_bytes: int = GATHER_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors on the CPU, each in one of the holders; collective: every process exhausts the iterator.

    Args:
        tensors: of the model, in the same order in all processes.
        world: the processes.
        dtype: of floating-point tensors.
        holders: processes that receive tensors.
        gather_bytes: full bytes that a holder receives at a time.

    Yields:
        Name and tensor of those that this process holds, in order. Memory is used again once the next is asked for.
    """
    staging = _Staging(world.device)
    if world.processes == 1:
        for tensor in tensors:
            yield tensor.name, staging.assembled(tensor, tensor.dtype_as(dtype))
        return
    rounds = _Rounds(world, gather_bytes, staging)
    for batch in _batches(tensors, dtype, holders, gather_bytes):
        yield from rounds.add(batch)
    yield from rounds.flush()


def own_shards(tensors: Iterable[DividedTensor], world: World, dtype: torch.dtype) -> Iterator[WeightShard]:
    """This process's boxes of every tensor, on the CPU. Copies of a tensor take turns, tensor by tensor.

    Args:
        tensors, world, dtype: as for `full_tensors`.

    Yields:
        Shards. Memory is used again once the next is asked for.
    """
    staging = _Staging(world.device)
    for index, tensor in enumerate(tensors):
        copy, boxes = tensor.place(world.process)
        if index % tensor.copies == copy:
            for box, local in zip(boxes, tensor.local, strict=True):
                yield tensor.name, box, staging.on_host(local, tensor.dtype_as(dtype))


def exported_tensors(
    tensors: Iterable[DividedTensor],
    dtype: torch.dtype,
    holders: Sequence[int] = (0,),
    gather_bytes: int = GATHER_BYTES,
) -> list[ExportedTensor]:
    """The tensors that `full_tensors` yields in all of its processes, in the order of `tensors`."""
    return [
        ExportedTensor(entry.tensor.name, entry.dtype, entry.tensor.shape, batch.holder)
        for batch in _batches(tensors, dtype, holders, gather_bytes)
        for entry in batch.entries
    ]


def _batches(
    tensors: Iterable[DividedTensor], dtype: torch.dtype, holders: Sequence[int], gather_bytes: int
) -> Iterator[_Batch]:
    """Batches in the order of `tensors`, each for the holder that has received the fewest bytes."""
    tensors = list(tensors)
    if len(holders) > 1:
        # A small model has fewer full batches than holders.
        total = sum(prod(tensor.shape) * tensor.dtype_as(dtype).itemsize for tensor in tensors)
        gather_bytes = min(gather_bytes, -(-total // len(holders)))
    received = dict.fromkeys(holders, 0)

    def for_holder(batch: _Batch) -> _Batch:
        batch.holder = min(received, key=lambda process: received[process])
        received[batch.holder] += batch.nbytes
        return batch

    batch = _Batch()
    for tensor in tensors:
        wire_dtype = tensor.dtype_as(dtype)
        if batch.entries and batch.nbytes + prod(tensor.shape) * wire_dtype.itemsize > gather_bytes:
            yield for_holder(batch)
            batch = _Batch()
        batch.add(tensor, wire_dtype)
    if batch.entries:
        yield for_holder(batch)


class _Staging:
    """Memory for tensors on their way: each use has its own, which is kept from one tensor to the next."""

    def __init__(self, device: torch.device) -> None:
        cpu = torch.device("cpu")
        devices = {"full": cpu, "on_host": cpu, "sent": device, "arrived": device}
        self._memory = {use: torch.empty(0, dtype=torch.uint8, device=device) for use, device in devices.items()}

    def assembled(self, tensor: DividedTensor, dtype: torch.dtype) -> Tensor:
        """A tensor that this process has whole, cast; valid until the next call."""
        _, boxes = tensor.place(0)
        if len(boxes) == 1:
            return self.on_host(tensor.local[0], dtype)
        full = self.reserve("full", prod(tensor.shape) * dtype.itemsize).view(dtype).view(tensor.shape)
        for box, local in zip(boxes, tensor.local, strict=True):
            full[box].copy_(self.on_host(local, dtype))
        return full

    def on_host(self, local: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor of this process, cast; valid until the next call."""
        # Cast on the device: fewer bytes come to the host.
        own = local.to(dtype).contiguous()
        return self.to_host(own.view(-1).view(torch.uint8)).view(dtype).view(own.shape)

    def to_host(self, messages: Tensor) -> Tensor:
        """Copies bytes to host memory, valid until the next call."""
        if messages.device.type == "cpu":
            return messages
        return self.reserve("on_host", len(messages), pinned=True).copy_(messages)

    def reserve(self, use: str, nbytes: int, *, pinned: bool = False) -> Tensor:
        """Bytes for a use, valid until its next call."""
        memory = self._memory[use]
        if len(memory) < nbytes:
            device = memory.device
            # Frees the old memory before it allocates the new.
            memory = self._memory[use] = torch.empty(0, dtype=torch.uint8, device=device)
            memory = self._memory[use] = torch.empty(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned)
        return memory[:nbytes]


class _Rounds:
    """Exchanges batches, one per holder at a time."""

    def __init__(self, world: World, gather_bytes: int, staging: _Staging) -> None:
        self._world = world
        self._gather_bytes = gather_bytes
        self._staging = staging
        self._round: dict[int, tuple[_Batch, list[int]]] = {}
        # Bytes that each process sends in this round.
        self._leaving = [0] * world.processes

    def add(self, batch: _Batch) -> Iterator[tuple[str, Tensor]]:
        """Takes a batch into the round; the tensors of the round before, where that one is full.

        A round is full with a batch for the same holder, or once some process sends `gather_bytes`. Tensors that follow
        one another may all be in that one.
        """
        if batch.holder in self._round or max(self._leaving) >= self._gather_bytes:
            yield from self.flush()
        lengths = [batch.message_bytes(process) for process in range(self._world.processes)]
        self._round[batch.holder] = batch, lengths
        self._leaving = [sent + length for sent, length in zip(self._leaving, lengths, strict=True)]

    def flush(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the present round that this process holds."""
        if not self._round:
            return
        process, processes = self._world.process, self._world.processes
        batches, self._round, self._leaving = self._round, {}, [0] * processes
        nothing = _Batch(), [0] * processes
        own, incoming = batches.get(process, nothing)
        outgoing = [batches.get(holder, nothing)[1][process] for holder in range(processes)]
        messages = self._staging.reserve("sent", sum(outgoing)).split(outgoing)
        for holder, (batch, _) in batches.items():
            for part in batch.parts(process):
                local = part.entry.tensor.local[part.number]
                messages[holder][part.start : part.stop].view(part.entry.dtype).view(local.shape).copy_(local)
        full = self._staging.reserve("full", own.nbytes)
        arriving = [own.parts(source) for source in range(processes)]
        sources = max(sum(length > 0 for length in lengths) for _, lengths in batches.values())
        longest = max(max(lengths) for _, lengths in batches.values())
        step = self._gather_bytes // max(sources, 1)
        for first in range(0, longest, step):
            sizes = [min(max(length - first, 0), step) for length in incoming]
            sent = [message[first : first + step] for message in messages]
            arrived = self._staging.reserve("arrived", sum(sizes))
            dist.all_to_all_single(arrived, torch.cat(sent), sizes, [len(part) for part in sent])
            for parts, piece in zip(arriving, self._staging.to_host(arrived).split(sizes), strict=True):
                for part in parts:
                    part.place(full, piece, first)
        for entry in own.entries:
            data = full[entry.start : entry.start + entry.nbytes]
            yield entry.tensor.name, data.view(entry.dtype).view(entry.tensor.shape)
