"""The weights of a checkpoint that holds an adapter alone: the base from its folder, with the adapter's product added.

Invariant: memory holds one tensor of the model, and one layer's adapter.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rollmesh.learner.engines.tensors.checkpoint_tensors import read_tensors
from rollmesh.learner.engines.tensors.state import MODEL_KEY
from rollmesh.learner.model_files.adapter_names import A_END, B_END, adapted_layer
from rollmesh.learner.model_files.reading import read_parts
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.learner.model_files.weight_files import full_part
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.weights.merging import merge

_WEIGHT = ".weight"


def read_merged(
    checkpoint: Path, source: StoredModel, scale: float, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Full tensors of the model in its order, on the CPU.

    Args:
        checkpoint: of an adapter, written by any number of ranks.
        source: the base, open.
        scale: of the adapter's products.
        dtype: of floating-point tensors.

    Raises:
        DataError: the checkpoint has no adapter, or one of another model; a file cannot be read.
    """
    described = _describe(checkpoint)
    layers = {layer for name in described if (layer := adapted_layer(name)) is not None}
    shapes = source.describe()
    if not layers:
        raise DataError(
            f"checkpoint {checkpoint} holds no adapter", hint="leave learner.lora out: it was written without"
        )
    if unknown := sorted(layer for layer in layers if f"{layer}{_WEIGHT}" not in shapes):
        raise DataError(f"checkpoint {checkpoint} has an adapter of {unknown[0]}, which the model does not have")
    conversions = {name: conversion for conversion in source.plan.conversions for name in conversion.results}
    for name, shaped in shapes.items():
        full = torch.empty(shaped.shape, dtype=torch.float32 if shaped.is_floating_point() else shaped.dtype)
        for _, part, values in read_parts(source, conversions[name], [(name, full_part(full))]):
            full[tuple(part)] = values.to(full.dtype)
        layer = name.removesuffix(_WEIGHT)
        if name.endswith(_WEIGHT) and layer in layers:
            wanted = {end: described[f"{layer}{end}"] for end in (A_END, B_END)}
            a, b = (
                values
                for _, values in read_tensors(checkpoint, {f"{layer}{e}": t for e, t in wanted.items()}, torch.float32)
            )
            full = merge(full, a, b, scale)
        yield name, full.to(dtype) if full.is_floating_point() else full


def _describe(checkpoint: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint's model, without memory."""
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {
        name.removeprefix(f"{MODEL_KEY}."): torch.empty(entry.size, device="meta")
        for name, entry in stored.items()
        if name.startswith(f"{MODEL_KEY}.") and isinstance(entry, TensorStorageMetadata)
    }
