"""A Hugging Face folder, written tensor by tensor: safetensors files with their index, configuration, tokenizer.

All that training leaves alone is copied as it is. That is tensors that the model does not use, such as those of a
vision tower, and files such as the tokenizer's.

Invariants: memory holds the tensors of one conversion and what it makes of them. That is one tensor of the model, with
all experts of a layer in it, and one copy of it. `config.json` comes last: a folder without it was broken off.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from rollmesh.learner.model_files.carried_files import copy_carried
from rollmesh.learner.model_files.conversion import group_for_storing, to_stored
from rollmesh.learner.model_files.stored_model import StoredModel
from rollmesh.learner.model_files.untouched import UntouchedTensors
from rollmesh.learner.model_files.weight_files import DTYPES, SINGLE_NAME
from rollmesh.learner.model_files.written_settings import write_settings
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.weights.safetensors_format import INDEX_NAME, LENGTH_BYTES, bucket_file

FILE_BYTES = 5_000_000_000
"""Bytes of weights in a file; more only where a single tensor has more."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_CODES = {dtype: code for code, dtype in DTYPES.items()}


def write_folder(
    folder: Path,
    source: StoredModel,
    described: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Writes a model that `transformers` and inference engines load.

    Args:
        folder: made where it is absent.
        source: gives configuration, tokenizer and processor, and the form in which tensors are stored.
        described: a tensor without memory for each of the model's, in the order in which they come.
        tensors: their values, tied ones once; each may be overwritten once the next is asked for.
        dtype: of floating-point tensors.
        file_bytes: bytes of weights in a file.

    Raises:
        DataError: the disk refuses; what is there then is no model.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_weights(folder, source, described, tensors, dtype, file_bytes)
        _write_rest(folder, source, dtype)
    except OSError as error:
        hint = "free space there" if error.errno in _FULL else "choose a folder that you can write"
        raise DataError(f"cannot write {folder}: {error.strerror or error}", hint=hint) from error


def _write_weights(
    folder: Path,
    source: StoredModel,
    described: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    file_bytes: int,
) -> None:
    groups, untouched = group_for_storing(source.model, described), UntouchedTensors(source, dtype)
    empty = ((name, tensor.to("meta")) for name, tensor in described.items())
    files = _plan_files(_stored(source, groups, empty, dtype, untouched, untouched.describe), file_bytes)
    names = [bucket_file(index, len(files)) for index in range(len(files))] if len(files) > 1 else [SINGLE_NAME]
    coming = _stored(source, groups, tensors, dtype, untouched, untouched.read)
    for name, planned in zip(names, files, strict=True):
        with (folder / name).open("wb") as file:
            file.write(_header(planned))
            for (stored_name, shaped), (found, tensor) in zip(planned.items(), coming, strict=False):
                assert (found, tensor.shape, tensor.dtype) == (stored_name, shaped.shape, shaped.dtype), found
                file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    if len(files) > 1:
        weight_map = {stored_name: name for name, planned in zip(names, files, strict=True) for stored_name in planned}
        total = sum(tensor.nbytes for planned in files for tensor in planned.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX_NAME).write_text(json.dumps(index, indent=1), encoding="utf-8")


def _stored(
    source: StoredModel,
    groups: Iterable[Sequence[str]],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    untouched: UntouchedTensors,
    carry: Callable[[str], Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """Tensors as they are stored, by their stored names, from a model's, which come in order; then carried ones.

    Those that are not of floating point, small ones, come last: the format requires the numbers at their places.
    """
    others: dict[str, Tensor] = {}
    coming = iter(tensors)
    for group in groups:
        held: dict[str, Tensor] = {}
        while group[-1] not in held:
            name, tensor = next(coming)
            # The last one is used before the next is asked for.
            held[name] = tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=name != group[-1])
        for name, tensor in to_stored(source.model, held).items():
            if tensor.is_floating_point():
                yield name, untouched.kept(name, tensor)
            else:
                others[name] = tensor.clone()
    for name in untouched.carried:
        if (tensor := carry(name)).is_floating_point():
            yield name, tensor
        else:
            others[name] = tensor
    yield from sorted(others.items(), key=lambda item: -item[1].itemsize)


def _plan_files(described: Iterable[tuple[str, Tensor]], file_bytes: int) -> list[dict[str, Tensor]]:
    """The tensors of each file, in order; each at a place that its numbers can have."""
    files: list[dict[str, Tensor]] = []
    end = file_bytes
    for name, tensor in described:
        kind = next(iter(files[-1].values())).is_floating_point() if files else None
        if end + tensor.nbytes > file_bytes or tensor.is_floating_point() != kind or end % tensor.itemsize:
            files.append({})
            end = 0
        files[-1][name] = tensor
        end += tensor.nbytes
    return files


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    """The header of a file, its length before it."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _write_rest(folder: Path, source: StoredModel, dtype: torch.dtype) -> None:
    """Writes all but the weights."""
    copy_carried(source.folder, folder)
    write_settings(folder, source, dtype)
