"""One process's part of a version: copied by the thread that trains, digested afterwards by another one.

Processes that fill a version together copy their own shards, wherever these lie, and digest whole buckets when all have
copied. Else a process copies what it digests: full tensors.

Invariants: once a copy has returned nothing of the model is read any more, so training may change it. Digests are those
of the copied bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from rollmesh.learner.engines.interface import WeightShard
from rollmesh.learner.weights.version_layout import PartDigests, PlacedTensor, VersionLayout
from rollmesh.mesh.weights import Digest
from rollmesh.mesh.weights.tensors import dtype_name

# Bytes digested for a tensor and for its bucket before the next: they stay in a processor's cache in between.
_CHUNK_BYTES = 1 << 20


def copy_part(part: Sequence[PlacedTensor], tensors: Iterable[tuple[str, torch.Tensor]], target: memoryview) -> None:
    """Copies tensors to their places.

    Args:
        part: of this process.
        tensors: those of the part, in its order; each is read before the next is asked for. They have the dtype and
            shape of the part, on any device.
        target: the version's bytes, writable; none are needed for an empty part.
    """
    whole = torch.frombuffer(target, dtype=torch.uint8) if target else torch.empty(0, dtype=torch.uint8)
    for placed, (name, tensor) in zip(part, tensors, strict=True):
        assert (placed.name, placed.dtype, placed.shape) == (name, dtype_name(tensor.dtype), tuple(tensor.shape)), (
            f"{name} is not the {placed.name} of the layout"
        )
        start = placed.place.start
        own = whole[start : start + placed.nbytes].view(tensor.dtype).view(tensor.shape)
        own.copy_(tensor.detach())


def copy_shards(layout: VersionLayout, shards: Iterable[WeightShard], target: memoryview) -> list[tuple[int, int]]:
    """Copies parts of tensors to their places.

    Args:
        layout: of the version.
        shards: each is read before the next is asked for.
        target: the version's bytes, writable.

    Returns:
        Beginning and end of each range of bytes that was written (of what lies between, where a part is strided).
    """
    whole = torch.frombuffer(target, dtype=torch.uint8)
    ranges = []
    for name, place, shard in shards:
        placed = layout.tensor(name)
        start = placed.place.start
        own = whole[start : start + placed.nbytes].view(shard.dtype).view(placed.shape)[place]
        assert (placed.dtype, own.shape) == (dtype_name(shard.dtype), shard.shape), f"{name} is not that of the layout"
        own.copy_(shard)
        if own.numel():
            first = int(own.storage_offset()) * own.itemsize
            length = 1 + sum((size - 1) * stride for size, stride in zip(own.shape, own.stride(), strict=True))
            ranges.append((first, first + length * own.itemsize))
    return ranges


def digest_part(part: Sequence[PlacedTensor], data: memoryview) -> PartDigests:
    """Digests of a part's tensors and buckets.

    Args:
        part: of this process.
        data: the version's bytes.
    """
    tensors: list[str] = []
    buckets: list[Digest] = []
    end = 0
    for placed in part:
        start = placed.place.start
        if placed.place.opens_bucket:
            buckets.append(Digest())
            end = start
        own = Digest()
        # Zeros between two tensors belong to the bucket alone.
        buckets[-1].update(data[end:start])
        end = start + placed.nbytes
        for chunk in _chunks(data[start:end]):
            own.update(chunk)
            buckets[-1].update(chunk)
        tensors.append(own.hexdigest())
    return PartDigests(tensors, [bucket.hexdigest() for bucket in buckets])


def _chunks(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]
