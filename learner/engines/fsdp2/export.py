"""Full tensors from shards, in bounded memory: each comes to one process, a holder.

Tensors are gathered in batches, and each batch goes to the holder that has received the fewest bytes so far. Batches of
different holders travel together, in a round. Every process casts its shards and packs them into one message per
holder, and all exchange their messages piece by piece. A holder brings each piece to the host and puts the rows in
their places. Where there are several copies of the model, it gets them from the processes of its own.

Invariants: in addition to the model, a holder has one batch of full tensors on the host, and `gather_bytes` that
arrive. Every process has its own shards of one round, which are at most a batch. A batch exceeds `gather_bytes` only
where a single tensor does. No process ever holds the model's full weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from rollmesh.learner.engines.interface import ExportedTensor, WeightShard
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

    @property
    def nbytes(self) -> int:
        return self.tensor.shape.numel() * self.dtype.itemsize

    @property
    def shards(self) -> int:
        return self.tensor.device_mesh.shape[-1] if isinstance(self.tensor, DTensor) else 1

    def rows(self, shard: int) -> tuple[int, int]:
        """First row and number of rows in a shard: as `torch.chunk` divides them."""
        total = self.tensor.shape[0]
        most = -(-total // self.shards)
        first = min(shard * most, total)
        return first, min(most, total - first)


@dataclass(slots=True)
class _Batch:
    """Tensors for one holder, side by side; or a single one that the holder has whole, which is not gathered."""

    entries: list[_GatherEntry] = field(default_factory=list)
    nbytes: int = 0
    holder: int = 0
    whole: bool = False

    def add(self, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
        entry = _GatherEntry(name, tensor, dtype, self.nbytes)
        self.entries.append(entry)
        self.nbytes += aligned(entry.nbytes)

    def message_bytes(self, shard: int) -> int:
        """Size of the message with a shard's rows."""
        return sum(aligned(entry.rows(shard)[1] * entry.row_bytes) for entry in self.entries)

    def parts(self, message: Tensor, shard: int) -> Iterator[tuple[_GatherEntry, Tensor]]:
        """Each tensor with its rows in the message of a shard."""
        start = 0
        for entry in self.entries:
            length = entry.rows(shard)[1] * entry.row_bytes
            yield entry, message[start : start + length]
            start += aligned(length)

    def place(self, full: Tensor, piece: Tensor, first: int, shard: int) -> None:
        """Puts a piece of the message of a shard, from its byte `first` on, into the full tensors' bytes."""
        start = -first
        for entry in self.entries:
            row, rows = entry.rows(shard)
            length = rows * entry.row_bytes
            begin, end = max(start, 0), min(start + length, len(piece))
            if begin < end:
                place = entry.start + row * entry.row_bytes + begin - start
                full[place : place + end - begin].copy_(piece[begin:end])
            start += aligned(length)


def full_tensors(
    named: Iterable[tuple[str, Tensor]],
    world: World,
    dtype: torch.dtype,
    holders: Sequence[int] = (0,),
    gather_bytes: int = GATHER_BYTES,
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors on the CPU, each in one of the holders; collective: every process exhausts the iterator.

    Args:
        named: names and tensors, the same in all processes. DTensors are sharded by rows over all of them, or in each
            copy of the model (`shard_mesh`).
        world: the processes.
        dtype: of floating-point tensors.
        holders: processes that receive tensors.
        gather_bytes: full bytes that a holder receives at a time.

    Yields:
        Name and tensor of those that this process holds, in order. Memory is used again once the next is asked for.
    """
    staging = _Staging(world.device)
    rounds = _Rounds(world, gather_bytes, staging)
    for batch in _batches(named, world.processes, dtype, holders, gather_bytes):
        if not batch.whole:
            yield from rounds.add(batch)
            continue
        yield from rounds.flush()
        if world.process == batch.holder:
            for entry in batch.entries:
                yield entry.name, staging.on_host(entry.tensor, entry.dtype)
    yield from rounds.flush()


def own_shards(named: Iterable[tuple[str, Tensor]], world: World, dtype: torch.dtype) -> Iterator[WeightShard]:
    """This process's rows of every tensor, on the CPU; the leader has those that are not sharded.

    Copies of the model take turns, tensor by tensor.

    Args:
        named, world, dtype: as for `full_tensors`.

    Yields:
        Shards. Memory is used again once the next is asked for.
    """
    staging = _Staging(world.device)
    for index, (name, tensor) in enumerate(named):
        wire_dtype = dtype if tensor.is_floating_point() else tensor.dtype
        place: tuple[slice, ...] = ()
        if world.processes > 1 and isinstance(tensor, DTensor):
            entry = _GatherEntry(name, tensor, wire_dtype, 0)
            copy, shard = divmod(world.process, entry.shards)
            first, rows = entry.rows(shard)
            if not rows or index % (world.processes // entry.shards) != copy:
                continue
            place = (slice(first, first + rows),)
        elif world.process:
            continue
        yield name, place, staging.on_host(tensor, wire_dtype)


def exported_tensors(
    named: Iterable[tuple[str, Tensor]],
    processes: int,
    dtype: torch.dtype,
    holders: Sequence[int] = (0,),
    gather_bytes: int = GATHER_BYTES,
) -> list[ExportedTensor]:
    """The tensors that `full_tensors` yields in all of its processes, in the order of `named`."""
    return [
        ExportedTensor(entry.name, entry.dtype, tuple(entry.tensor.shape), batch.holder)
        for batch in _batches(named, processes, dtype, holders, gather_bytes)
        for entry in batch.entries
    ]


def _batches(
    named: Iterable[tuple[str, Tensor]],
    processes: int,
    dtype: torch.dtype,
    holders: Sequence[int],
    gather_bytes: int,
) -> Iterator[_Batch]:
    """Batches in the order of `named`, each for the holder that has received the fewest bytes."""
    named = list(named)
    if len(holders) > 1:
        # A small model has fewer full batches than holders.
        total = sum(
            tensor.numel() * (dtype if tensor.is_floating_point() else tensor.dtype).itemsize for _, tensor in named
        )
        gather_bytes = min(gather_bytes, -(-total // len(holders)))
    received = dict.fromkeys(holders, 0)

    def for_holder(batch: _Batch) -> Iterator[_Batch]:
        if batch.entries:
            batch.holder = holders[0] if batch.whole else min(received, key=lambda process: received[process])
            received[batch.holder] += batch.nbytes
            yield batch

    batch = _Batch()
    for name, tensor in named:
        wire_dtype = dtype if tensor.is_floating_point() else tensor.dtype
        whole = processes == 1 or not isinstance(tensor, DTensor)
        if whole or (batch.entries and batch.nbytes + tensor.shape.numel() * wire_dtype.itemsize > gather_bytes):
            yield from for_holder(batch)
            batch = _Batch(whole=whole)
        batch.add(name, tensor, wire_dtype)
        if whole:
            yield from for_holder(batch)
            batch = _Batch()
        elif isinstance(tensor, DTensor):
            *copies, shards = tensor.placements
            known = (shards, set(copies) - {Replicate()}) == (Shard(0), set())
            assert known, f"{name} is sharded as {tensor.placements}"
    yield from for_holder(batch)


def _local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


class _Staging:
    """Memory for tensors on their way: each use has its own, which is kept from one tensor to the next."""

    def __init__(self, device: torch.device) -> None:
        cpu = torch.device("cpu")
        devices = {"full": cpu, "on_host": cpu, "sent": device, "arrived": device}
        self._memory = {use: torch.empty(0, dtype=torch.uint8, device=device) for use, device in devices.items()}

    def on_host(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """This process's part of a tensor, cast; valid until the next call."""
        # Cast on the device: fewer bytes come to the host.
        own = _local(tensor).to(dtype).contiguous()
        return self.to_host(own.reshape(-1).view(torch.uint8)).view(dtype).view(own.shape)

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
        self._round: dict[int, _Batch] = {}
        self._staging = staging

    def add(self, batch: _Batch) -> Iterator[tuple[str, Tensor]]:
        """Takes a batch into the round; the tensors of the round before, where that has a batch for the same holder."""
        if batch.holder in self._round:
            yield from self.flush()
        self._round[batch.holder] = batch

    def flush(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the present round that this process holds."""
        if not self._round:
            return
        batches, self._round = self._round, {}
        process, processes = self._world.process, self._world.processes
        shards = next(iter(batches.values())).entries[0].shards
        copy, shard = divmod(process, shards)
        neighbours = range(copy * shards, (copy + 1) * shards)
        own, asked = batches.get(process, _Batch()), {p: batches[p] for p in neighbours if p in batches}
        outgoing = [asked[p].message_bytes(shard) if p in asked else 0 for p in range(processes)]
        incoming = [own.message_bytes(p % shards) if p in neighbours else 0 for p in range(processes)]
        messages = self._staging.reserve("sent", sum(outgoing)).split(outgoing)
        for holder, batch in asked.items():
            for entry, part in batch.parts(messages[holder], shard):
                part.view(entry.dtype).copy_(_local(entry.tensor).reshape(-1))
        full = self._staging.reserve("full", own.nbytes)
        longest = max(batch.message_bytes(number) for batch in batches.values() for number in range(shards))
        piece = self._gather_bytes // shards
        for first in range(0, longest, piece):
            sizes = [min(max(length - first, 0), piece) for length in incoming]
            sent = [message[first : first + piece] for message in messages]
            arrived = self._staging.reserve("arrived", sum(sizes))
            dist.all_to_all_single(arrived, torch.cat(sent), sizes, [len(part) for part in sent])
            for source, part in enumerate(self._staging.to_host(arrived).split(sizes)):
                own.place(full, part, first, source % shards)
        for entry in own.entries:
            data = full[entry.start : entry.start + entry.nbytes]
            yield entry.name, data.view(entry.dtype).view(entry.tensor.shape)
