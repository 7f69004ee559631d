"""The weights of a stored model, tensor by tensor, with the products of an adapter added where there is one.

Invariant: memory holds one tensor of the model, and one layer's adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from rollmesh.learner.model_files.reading import read_parts, refuse_other_twins
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.learner.model_files.weight_files import full_part
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.weights.merging import merge

_WEIGHT = ".weight"


class Adapter(Protocol):
    """A low-rank adapter where it is stored (Hu et al. 2021, https://arxiv.org/abs/2106.09685).

    Attributes:
        origin: where, for errors.
        scale: factor of the products.
        layers: names of the layers that have a product.
    """

    origin: str
    scale: float
    layers: frozenset[str]

    def read(self, layer: str) -> tuple[Tensor, Tensor]:
        """A, [rank, in], and B, [out, rank], of a layer, in float32 on the CPU."""
        ...


def read_full(
    source: StoredModel,
    dtype: torch.dtype,
    adapter: Adapter | None = None,
    described: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors of a model in its order, on the CPU.

    Args:
        source: open.
        dtype: of floating-point tensors.
        adapter: W + scale * B A takes the place of the weight W of its layers.
        described: the tensors that are wanted, without memory; None: all.

    Raises:
        DataError: the adapter is of another model; tied tensors have several values; a file cannot be read.
    """
    shapes = source.describe() if described is None else described
    layers = adapter.layers if adapter is not None else frozenset()
    if adapter is not None and (unknown := sorted(layer for layer in layers if f"{layer}{_WEIGHT}" not in shapes)):
        raise DataError(
            f"{adapter.origin} has an adapter of {unknown[0]}, which the model does not have",
            hint="give the model with which the adapter was trained",
        )
    refuse_other_twins(source)
    conversions = {name: conversion for conversion in source.plan.conversions for name in conversion.results}
    for name, shaped in shapes.items():
        full = torch.empty(shaped.shape, dtype=torch.float32 if shaped.is_floating_point() else shaped.dtype)
        for _, part, values in read_parts(source, conversions[name], [(name, full_part(full))]):
            full[tuple(part)] = values.to(full.dtype)
        layer = name.removesuffix(_WEIGHT)
        if adapter is not None and name.endswith(_WEIGHT) and layer in layers:
            full = _merged(full, adapter, layer)
        yield name, full.to(dtype) if full.is_floating_point() else full


def _merged(weight: Tensor, adapter: Adapter, layer: str) -> Tensor:
    a, b = adapter.read(layer)
    if weight.dim() != 2 or (b.shape[0], a.shape[1]) != tuple(weight.shape) or b.shape[1] != a.shape[0]:
        raise DataError(
            f"{adapter.origin}: the adapter of {layer} is {list(b.shape)} by {list(a.shape)}, and the layer "
            f"{list(weight.shape)}",
            hint="give the model with which the adapter was trained",
        )
    return merge(weight, a, b, adapter.scale)
