"""The layout of a version's bytes: the buckets of one process after those of another.

Invariants: a bucket belongs to one process, which alone digests it. The layout follows from names, dtypes,
shapes and holders. So every process computes the same one, and it is the same for every version. A manifest lists the
tensors in the order of the model, whichever processes hold them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollmesh.learner.engines.interface import ExportedTensor
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import DTYPE_BYTES, BucketLayout, Placement, manifest_digest
from rollmesh.mesh.weights.layout import tensor_bytes
from rollmesh.mesh.weights.tensors import dtype_name
from rollmesh.protos import weights_pb2


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor with its place.

    Attributes:
        name, dtype, shape, holder: as of `ExportedTensor`, the dtype by its name.
        nbytes: of it.
        place: in the version's bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    holder: int
    nbytes: int
    place: Placement


@dataclass(frozen=True, slots=True)
class PartDigests:
    """Digests of one process's part.

    Attributes:
        tensors: of each of its tensors, in the order of the model.
        buckets: of each of its buckets, in their order.
    """

    tensors: Sequence[str]
    buckets: Sequence[str]


class VersionLayout:
    """The places of all tensors of a version.

    Args:
        tensors: in the order of the model.
        bucket_bytes: `weights.bucket_bytes`.
        ties: names that share the bytes of another tensor, each with the name of that tensor.

    Attributes:
        nbytes: of a version, padding included.

    Raises:
        WeightsError: there are no tensors, or a dtype cannot travel.
    """

    def __init__(
        self, tensors: Sequence[ExportedTensor], bucket_bytes: int, ties: Mapping[str, str] | None = None
    ) -> None:
        buckets = BucketLayout(bucket_bytes)
        placed: dict[str, PlacedTensor] = {}
        for holder in sorted({tensor.holder for tensor in tensors}):
            buckets.close_bucket()
            for tensor in tensors:
                if tensor.holder == holder:
                    placed[tensor.name] = _place(tensor, buckets)
        self._ties = dict(ties or {})
        # In the order of the model.
        self._tensors = [placed[tensor.name] for tensor in tensors]
        self._by_name = placed
        self.nbytes = buckets.total_bytes
        if not self.nbytes:
            raise WeightsError("the model has no weights")

    def tensor(self, name: str) -> PlacedTensor:
        """The place of one tensor."""
        return self._by_name[name]

    def part(self, holder: int) -> list[PlacedTensor]:
        """The tensors of one process, in the order of the model, which is that of their places."""
        return [tensor for tensor in self._tensors if tensor.holder == holder]

    def manifest(self, run: str, policy: PolicyVersion, parts: Mapping[int, PartDigests]) -> weights_pb2.Manifest:
        """The manifest of a version, without offers.

        Args:
            run: name of the run.
            policy: the version.
            parts: by process.
        """
        manifest = weights_pb2.Manifest(run=run, policy=policy.to_proto())
        digests = {holder: iter(part.tensors) for holder, part in parts.items()}
        lengths: dict[int, int] = {}
        for tensor in self._tensors:
            place = tensor.place
            manifest.tensors.add(
                name=tensor.name,
                dtype=tensor.dtype,
                shape=tensor.shape,
                digest=next(digests[tensor.holder]),
                bucket=place.bucket,
                offset=place.offset,
                nbytes=tensor.nbytes,
            )
            lengths[place.bucket] = max(lengths.get(place.bucket, 0), place.offset + tensor.nbytes)
        for name, twin in self._ties.items():
            manifest.tensors.add(
                name=name, dtype=self._by_name[twin].dtype, shape=self._by_name[twin].shape, tied_to=twin
            )
        in_order = [digest for _, part in sorted(parts.items()) for digest in part.buckets]
        for index, digest in enumerate(in_order):
            manifest.buckets.add(nbytes=lengths[index], digest=digest)
        manifest.digest = manifest_digest(manifest.tensors)
        return manifest


def _place(tensor: ExportedTensor, buckets: BucketLayout) -> PlacedTensor:
    dtype = dtype_name(tensor.dtype)
    if dtype not in DTYPE_BYTES:
        hint = f"known: {', '.join(DTYPE_BYTES)}"
        raise WeightsError(f"tensor {tensor.name} has dtype {dtype}, which cannot be sent", hint=hint)
    nbytes = tensor_bytes(dtype, tensor.shape)
    return PlacedTensor(tensor.name, dtype, tensor.shape, tensor.holder, nbytes, buckets.place(nbytes))
