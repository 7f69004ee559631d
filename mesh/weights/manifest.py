"""Checks of a manifest.

Invariant: a manifest that `check_manifest` accepts can be read without further checks of bounds. Every tensor lies
inside its bucket and has the length that its dtype and shape ask for. The manifest's digest is that of its entries. The
base of an adapter keeps the same rules, and has the weights that the adapter changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights.adapter import adapter_digest, check_factors
from rollmesh.mesh.weights.digest import manifest_digest
from rollmesh.mesh.weights.layout import ALIGNMENT, aligned, tensor_bytes
from rollmesh.protos import weights_pb2


def bucket_starts(buckets: Iterable[weights_pb2.BucketEntry]) -> tuple[int, ...]:
    """Start of each bucket in bytes, when all are concatenated, and the end of the last."""
    return tuple(accumulate((aligned(bucket.nbytes) for bucket in buckets), initial=0))


def check_manifest(manifest: weights_pb2.Manifest) -> None:
    """Checks a manifest as received.

    Raises:
        WeightsError: naming the tensor or the number that is wrong.
    """
    policy = PolicyVersion.from_proto(manifest.policy)
    if not manifest.tensors:
        raise WeightsError(f"manifest {policy} names no tensors")
    with_bytes: set[str] = set()
    seen: set[str] = set()
    for tensor in manifest.tensors:
        if tensor.name in seen:
            raise WeightsError(f"manifest {policy}: tensor {tensor.name} is listed twice")
        seen.add(tensor.name)
        if tensor.tied_to:
            if tensor.tied_to not in with_bytes:
                raise WeightsError(
                    f"manifest {policy}: {tensor.name} is tied to {tensor.tied_to}, which is not before it"
                )
            continue
        with_bytes.add(tensor.name)
        if tensor.nbytes != tensor_bytes(tensor.dtype, tensor.shape):
            raise WeightsError(
                f"manifest {policy}: {tensor.name} has {tensor.nbytes} bytes, "
                f"{tensor.dtype}{list(tensor.shape)} needs {tensor_bytes(tensor.dtype, tensor.shape)}"
            )
        if tensor.bucket >= len(manifest.buckets):
            raise WeightsError(f"manifest {policy}: {tensor.name} lies in bucket {tensor.bucket}, which does not exist")
        if tensor.offset + tensor.nbytes > manifest.buckets[tensor.bucket].nbytes or tensor.offset % ALIGNMENT:
            raise WeightsError(f"manifest {policy}: {tensor.name} lies outside its bucket, or is not aligned")
    found = manifest_digest(manifest.tensors)
    if manifest.HasField("base"):
        check_manifest(manifest.base)
        check_factors(manifest)
        found = adapter_digest(found, manifest.base.digest, manifest.scale)
    if found != manifest.digest:
        raise WeightsError(f"manifest {policy}: its digest is {found}, {manifest.digest} was announced")
