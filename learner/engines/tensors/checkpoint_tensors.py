"""The weights of a checkpoint, read without an engine, an optimizer or other ranks: one tensor after the other.

Invariant: memory holds one full tensor, and the part of it that one of the ranks has written. That part is float32, and
is held twice, for torch reads it through a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from rollmesh.learner.engines.tensors.state import MODEL_KEY
from rollmesh.mesh.errors import DataError


def read_tensors(folder: Path, described: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Full tensors of a checkpoint, on the CPU.

    Args:
        folder: of a checkpoint, written by any number of ranks.
        described: a tensor without memory for each one that is wanted.
        dtype: of floating-point tensors.

    Returns:
        Names and tensors, in order; each is read when it is asked for, which may raise `DataError`.

    Raises:
        DataError: it is no checkpoint, or one of another model.
    """
    with _named(folder):
        reader = _Reader(folder)
        _check(folder, reader.read_metadata(), described)
    return _read(reader, folder, described, dtype)


def _read(
    reader: _Reader, folder: Path, described: Mapping[str, Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for name, shaped in described.items():
        tensor = torch.empty(shaped.shape, dtype=dtype if shaped.is_floating_point() else shaped.dtype)
        with _named(folder):
            dcp.load({f"{MODEL_KEY}.{name}": tensor}, storage_reader=reader, no_dist=True)
        yield name, tensor


@contextmanager
def _named(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, CheckpointException, RuntimeError, ValueError, EOFError) as error:
        raise DataError(f"cannot read checkpoint {folder}: {type(error).__name__}: {error}") from error


class _Reader(FileSystemReader):
    """Reads the checkpoint's list of tensors once, not with each tensor again."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = super().read_metadata()

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self._metadata


def _check(folder: Path, metadata: Metadata, described: Mapping[str, Tensor]) -> None:
    """Refuses a checkpoint that lacks a tensor, or has it in another shape."""
    for name, shaped in described.items():
        stored = metadata.state_dict_metadata.get(f"{MODEL_KEY}.{name}")
        found = list(stored.size) if isinstance(stored, TensorStorageMetadata) else None
        if found != list(shaped.shape):
            told = f"{name} in the shape {found}" if found else f"no {name}"
            raise DataError(
                f"checkpoint {folder} holds {told}; the model's is {list(shaped.shape)}",
                hint="is it of this model? model.path of the run must be the model with which it began",
            )
