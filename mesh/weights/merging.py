"""The one rule by which an adapter is merged into its base, for all that do it: W + scale * B A."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rollmesh.mesh.weights.adapter import adapted_weights
from rollmesh.mesh.weights.digest import Buffer
from rollmesh.mesh.weights.tensors import named_tensors
from rollmesh.protos import weights_pb2


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """The merged weight, in float32: the sum of a large and a small number would lose the small one.

    Args:
        weight: [out, in], or some of its rows.
        a: [rank, in].
        b: [out, rank], or the same rows.
        scale: of the product.
    """
    return torch.addmm(weight.float(), b.float(), a.float(), alpha=scale)


def effective_tensors(
    manifest: weights_pb2.Manifest, data: Buffer, base: Buffer | None
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the policy that a version is: its tensors, or its base with the adapter merged.

    Merged weights are made as they are asked for, and rounded to the dtype of the base. The other tensors of a base are
    views of its bytes.

    Args:
        manifest: checked (`check_manifest`).
        data: of all buckets, concatenated; never written to again.
        base: of all buckets of its base, likewise; None where it has none.
    """
    if base is None:
        yield from named_tensors(manifest, data)
        return
    factors = dict(named_tensors(manifest, data))
    adapted = adapted_weights(manifest)
    for name, tensor in named_tensors(manifest.base, base):
        pair = adapted.get(name)
        if pair is None:
            yield name, tensor
        else:
            yield name, merge(tensor, factors[pair[0]], factors[pair[1]], manifest.scale).to(tensor.dtype)
