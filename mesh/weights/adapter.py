"""Versions that are a low-rank adapter alone, next to a base that never changes: names, digests, checks.

Invariants: a version names its base by digest, and the version's own digest counts the base and the scale. So two
versions with one digest are one policy, and an adapter is never taken for that of another base. The base has a version
of its own, below all others, in every incarnation of a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import xxhash

from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import weights_pb2

FROZEN_BASE = PolicyVersion(0, 0)
"""The version under which the bytes of a base are fetched; learners count their incarnations from 1."""
PEFT_PREFIX = "base_model.model."
"""Begin of all names that peft gives to an adapter's tensors."""
PEFT_A, PEFT_B = ".lora_A.weight", ".lora_B.weight"
"""Their ends: A is [rank, in], B is [out, rank]."""


def adapted_weight(name: str) -> str | None:
    """The weight, by Hugging Face name, to which a tensor of an adapter belongs; None for any other tensor."""
    for end in (PEFT_A, PEFT_B):
        if name.startswith(PEFT_PREFIX) and name.endswith(end):
            return f"{name.removeprefix(PEFT_PREFIX).removesuffix(end)}.weight"
    return None


def factor_names(weight: str) -> tuple[str, str]:
    """The names of A and B of an adapted weight."""
    layer = PEFT_PREFIX + weight.removesuffix(".weight")
    return layer + PEFT_A, layer + PEFT_B


def adapter_digest(tensors: str, base: str, scale: float) -> str:
    """The digest of a version that is an adapter.

    Args:
        tensors: digest of its own tensors (`manifest_digest`).
        base: digest of the base's manifest.
        scale: of the products.
    """
    return xxhash.xxh3_128_hexdigest(f"{tensors}\n{base}\n{scale!r}\n".encode())


def attach_base(manifest: weights_pb2.Manifest, base: weights_pb2.Manifest, scale: float) -> None:
    """Makes a manifest of an adapter's tensors that of a version."""
    manifest.base.CopyFrom(base)
    manifest.scale = scale
    manifest.digest = adapter_digest(manifest.digest, base.digest, scale)


def check_factors(manifest: weights_pb2.Manifest) -> None:
    """Checks that the tensors of an adapter are factors of weights of its base, which was checked before.

    Raises:
        WeightsError: naming the tensor that is none, or lacks the other factor.
    """
    policy = PolicyVersion.from_proto(manifest.policy)
    if manifest.base.HasField("base") or PolicyVersion.from_proto(manifest.base.policy) != FROZEN_BASE:
        raise WeightsError(f"manifest {policy}: its base is no frozen one")
    weights = {entry.name: entry for entry in manifest.base.tensors}
    factors = {entry.name: entry for entry in manifest.tensors}
    for name in factors:
        weight = adapted_weight(name)
        if weight is None or weight not in weights:
            raise WeightsError(f"manifest {policy}: {name} belongs to no weight of its base")
        a, b = (factors.get(factor) for factor in factor_names(weight))
        if a is None or b is None:
            raise WeightsError(f"manifest {policy}: {weight} has one factor of two")
        if not _fit(a.shape, b.shape, weights[weight].shape):
            shapes = f"{list(b.shape)} and {list(a.shape)}"
            raise WeightsError(f"manifest {policy}: the factors of {weight} are {shapes}, which is not its shape")


def adapted_weights(manifest: weights_pb2.Manifest) -> Mapping[str, tuple[str, str]]:
    """The names of A and B by the weight that they change."""
    found = {weight for entry in manifest.tensors if (weight := adapted_weight(entry.name)) is not None}
    return {weight: factor_names(weight) for weight in sorted(found)}


def _fit(a: Sequence[int], b: Sequence[int], weight: Sequence[int]) -> bool:
    if not len(a) == len(b) == len(weight) == 2:
        return False
    return a[0] == b[1] > 0 and (b[0], a[1]) == (weight[0], weight[1])
