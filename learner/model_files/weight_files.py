"""The weights of a model folder: safetensors files, of which a reader takes the parts that it needs.

Invariants: nothing is read before it is asked for, and nothing is kept. Files are read and not mapped, so that memory
holds what was asked for and no page of a file more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from rollmesh.learner.folder_facts.weight_names import COPY_AGAIN, weight_file_names
from rollmesh.learner.folder_facts.weight_names import SINGLE_NAME as SINGLE_NAME
from rollmesh.mesh.errors import DataError, WeightsError
from rollmesh.mesh.weights.safetensors_format import LENGTH_BYTES, header_length

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The dtypes that a model may be stored in, by safetensors' names. Others are quantized, and need scales."""

Part = tuple[slice, ...]
"""A part of a tensor: a range for each of its dimensions."""


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A stored tensor's first byte, in an open file."""

    path: Path
    file: BinaryIO
    start: int


class WeightFiles:
    """The stored tensors of a folder.

    Args:
        folder: with one file, or several and their index.

    Attributes:
        folder: as given.
        stored: a tensor without memory for each stored one, by its name: shape and dtype.

    Raises:
        DataError: there are no files, or one is missing or damaged; a tensor has a dtype of quantized weights.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stored: dict[str, Tensor] = {}
        self._tensors: dict[str, _StoredTensor] = {}
        self._open = ExitStack()
        try:
            for name in weight_file_names(folder):
                self._add(folder / name)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Closes the files; tensors that were read stay."""
        self._open.close()

    def read(self, name: str, part: Part) -> Tensor:
        """A part of a stored tensor, in its stored dtype, on the CPU.

        Whole rows are read; a part of their columns is a view of them.

        Raises:
            DataError: the file cannot be read.
        """
        stored, source = self.stored[name], self._tensors[name]
        rows = part[0] if part else slice(0, 1)
        tensor = torch.empty((rows.stop - rows.start, *stored.shape[1:]), dtype=stored.dtype)
        if not part:
            tensor = tensor.reshape(())
        memory = tensor.reshape(-1).view(torch.uint8).numpy().data
        position = source.start + rows.start * stored.shape[1:].numel() * stored.itemsize
        while memory:
            try:
                length = os.preadv(source.file.fileno(), [memory], position)
            except OSError as error:
                raise DataError(f"{source.path} cannot be read: {error.strerror}", hint=COPY_AGAIN) from error
            if not length:
                raise DataError(f"{source.path} is cut off: tensor {name} is not whole", hint=COPY_AGAIN)
            memory, position = memory[length:], position + length
        return tensor[(slice(None), *part[1:])] if part else tensor

    def _add(self, path: Path) -> None:
        """Adds the tensors of a file."""
        try:
            file = self._open.enter_context(path.open("rb"))
            size = path.stat().st_size
            length = header_length(file.read(LENGTH_BYTES))
            entries: dict[str, dict[str, Any]] = json.loads(file.read(length))
            start = LENGTH_BYTES + length
            entries.pop("__metadata__", None)
            for name, entry in entries.items():
                code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
                if code not in DTYPES:
                    raise DataError(
                        f"{path}: tensor {name} is stored as {code}, which is not trained here",
                        hint="choose the model in bfloat16, float16 or float32",
                    )
                stored = torch.empty(shape, dtype=DTYPES[code], device="meta")
                if begin < 0 or end - begin != stored.nbytes or start + end > size:
                    raise ValueError(f"tensor {name} is not whole")
                self.stored[name] = stored
                self._tensors[name] = _StoredTensor(path, file, start + begin)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}", hint=COPY_AGAIN) from error
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RuntimeError, WeightsError) as error:
            raise DataError(f"{path} is cut off or damaged: {error}", hint=COPY_AGAIN) from error


def full_part(tensor: Tensor) -> Part:
    """All of a tensor."""
    return tuple(slice(0, length) for length in tensor.shape)


def pieces(part: Part, itemsize: int, most: int) -> Iterator[Part]:
    """Splits a part along its first dimension.

    Args:
        part: of a tensor.
        itemsize: bytes of an element.
        most: bytes that a piece should have; one of a single row may have more.

    Yields:
        The pieces, in order; none where the part is empty.
    """
    if not part:
        yield part
        return
    first, *rest = part
    row = itemsize
    for other in rest:
        row *= other.stop - other.start
    if not row:
        return
    rows = max(1, most // row)
    for start in range(first.start, first.stop, rows):
        yield slice(start, min(start + rows, first.stop)), *rest
