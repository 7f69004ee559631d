"""Conversion between torch tensors and bytes, without copies where memory allows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.weights.digest import Buffer
from rollmesh.mesh.weights.layout import DTYPE_BYTES
from rollmesh.mesh.weights.manifest import bucket_starts
from rollmesh.protos import weights_pb2


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """`bfloat16` -> `torch.bfloat16`.

    Raises:
        WeightsError: a dtype that cannot travel.
    """
    dtype = getattr(torch, name, None) if name in DTYPE_BYTES else None
    if not isinstance(dtype, torch.dtype):
        raise WeightsError(f"dtype {name!r} cannot be received", hint=f"known: {', '.join(DTYPE_BYTES)}")
    return dtype


def to_wire(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor on the CPU, contiguous, floating-point ones in `dtype`; the tensor itself where it is so already."""
    wanted = dtype if tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to(device="cpu", dtype=wanted).contiguous()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor as a flat view of its memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def named_tensors(manifest: weights_pb2.Manifest, data: Buffer) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) for every entry, tied ones included.

    Args:
        manifest: checked (`check_manifest`).
        data: all buckets, concatenated; the tensors are views of it and must not be written to.
    """
    starts = bucket_starts(manifest.buckets)
    views: dict[str, torch.Tensor] = {}
    for entry in manifest.tensors:
        if entry.tied_to:
            yield entry.name, views[entry.tied_to]
            continue
        dtype = dtype_of(entry.dtype)
        if entry.nbytes == 0:
            view = torch.empty(tuple(entry.shape), dtype=dtype)
        else:
            view = torch.frombuffer(
                data,
                dtype=dtype,
                count=entry.nbytes // DTYPE_BYTES[entry.dtype],
                offset=starts[entry.bucket] + entry.offset,
            ).view(tuple(entry.shape))
        views[entry.name] = view
        yield entry.name, view
