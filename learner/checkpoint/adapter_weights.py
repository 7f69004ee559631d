"""The weights of a checkpoint that holds an adapter alone: by themselves, or added to the base from its folder.

Invariant: memory holds one tensor of the model, and one layer's adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from rollmesh.learner.engines.tensors.checkpoint_tensors import read_tensors
from rollmesh.learner.engines.tensors.state import MODEL_KEY
from rollmesh.learner.model_files.adapter_names import A_END, B_END, adapted_layer, is_adapter, peft_name
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
    shapes = source.describe()
    layers = _adapted_layers(checkpoint, described, shapes)
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


def read_adapter(checkpoint: Path, source: StoredModel) -> dict[str, Tensor]:
    """The adapter's own tensors in float32, by peft's names.

    Args:
        checkpoint: of an adapter, written by any number of ranks.
        source: the base, open.

    Raises:
        DataError: see `read_merged`.
    """
    described = _describe(checkpoint)
    _adapted_layers(checkpoint, described, source.describe())
    factors = {name: tensor for name, tensor in described.items() if is_adapter(name)}
    return {peft_name(name): tensor for name, tensor in read_tensors(checkpoint, factors, torch.float32)}


def _adapted_layers(checkpoint: Path, described: Mapping[str, Tensor], shapes: Mapping[str, Tensor]) -> set[str]:
    """The layers that have an adapter.

    Raises:
        DataError: none has, or one that the model does not have.
    """
    layers = {layer for name in described if (layer := adapted_layer(name)) is not None}
    if not layers:
        raise DataError(
            f"checkpoint {checkpoint} holds no adapter", hint="leave learner.lora out: it was written without"
        )
    if unknown := sorted(layer for layer in layers if f"{layer}{_WEIGHT}" not in shapes):
        raise DataError(f"checkpoint {checkpoint} has an adapter of {unknown[0]}, which the model does not have")
    return layers


def _describe(checkpoint: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint's model, without memory."""
    stored = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return {
        name.removeprefix(f"{MODEL_KEY}."): torch.empty(entry.size, device="meta")
        for name, entry in stored.items()
        if name.startswith(f"{MODEL_KEY}.") and isinstance(entry, TensorStorageMetadata)
    }
