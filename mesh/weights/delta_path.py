"""The path from a receiver's weights to the announced ones: a chain of deltas, or all bytes.

Invariants: the chain leads without a gap from exactly the receiver's weights to exactly the announced ones, by their
digests. So versions of equal weights are one place. Together its deltas have fewer bytes than the version in full. So
no announcement can make a receiver fetch more than the version's own size.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.protos import weights_pb2


def delta_path(base: weights_pb2.Manifest, target: weights_pb2.Manifest) -> Sequence[weights_pb2.Delta]:
    """The deltas that lead from `base` to `target`, in the order in which they are applied.

    Args:
        base: the receiver's weights, complete and verified.
        target: the announced weights, checked.

    Returns:
        Empty where all bytes have to be fetched, or are not more.
    """
    if not same_layout(base, target):
        return ()
    path: list[weights_pb2.Delta] = []
    digest = base.digest
    for delta in target.deltas:
        if delta.base_digest == digest and len(delta.buckets) == len(target.buckets):
            path.append(delta)
            digest = delta.digest
    if digest != target.digest:
        return ()
    return path if sum(map(_nbytes, path)) < _nbytes(target) else ()


def same_layout(one: weights_pb2.Manifest, other: weights_pb2.Manifest) -> bool:
    """True if both have the same tensors at the same places, whatever their values."""
    return _layout(one) == _layout(other)


def _layout(manifest: weights_pb2.Manifest) -> list[tuple[object, ...]]:
    tensors = [(t.name, t.dtype, tuple(t.shape), t.bucket, t.offset, t.nbytes, t.tied_to) for t in manifest.tensors]
    return [*tensors, *((bucket.nbytes,) for bucket in manifest.buckets)]


def _nbytes(buckets_of: weights_pb2.Delta | weights_pb2.Manifest) -> int:
    return sum(bucket.nbytes for bucket in buckets_of.buckets)
