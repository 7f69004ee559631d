"""Shared memory as SGLang's `/update_weights_from_tensor` takes it.

The endpoint takes one form: a pickle with tensors as handles of torch's shared memory. It opens only handles of
torch's own kind, in their file-system form (the descriptor form makes it crash). So this module, and no other, writes
a pickle. It holds nothing that came from anywhere else: names, numbers, and a handle. The server reads it with an
unpickler that admits these few constructors.

torch counts the users of such memory: each process that opens it takes one away that was added for it here. So a
payload is made for each process that opens it, when it is about to be sent.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_storage_filename, rebuild_tensor, rebuild_typed_storage

from rollmesh.generators.engines.sglang.transfers.interface import DtypeOf

# Where tensors begin, so that any dtype can be read in place.
ALIGNMENT = 64


class Bucket:
    """Tensors, concatenated, in shared memory.

    Args:
        layout: name, shape and dtype of each.

    Raises:
        RuntimeError: there is no memory for it.
    """

    def __init__(self, layout: Sequence[tuple[str, tuple[int, ...], torch.dtype]]) -> None:
        self._metadata: list[SimpleNamespace] = []
        end = 0
        for name, shape, dtype in layout:
            begin = -(-end // ALIGNMENT) * ALIGNMENT
            size = dtype.itemsize * torch.Size(shape).numel()
            end = begin + size
            self._metadata.append(
                SimpleNamespace(name=name, shape=shape, dtype=dtype, start_idx=begin, end_idx=end, numel=size)
            )
        self._storage = torch.UntypedStorage._new_using_filename_cpu(max(1, end))
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(self._storage)

    def fill(self, index: int, source: torch.Tensor) -> None:
        """Copies a tensor to its place, in the dtype of the layout."""
        meta = self._metadata[index]
        self._bytes[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape).copy_(source)

    def payload(self) -> str:
        """The message to one process of the server, which has to open it."""
        buffer = io.BytesIO()
        content = {"flattened_tensor": self._bytes, "metadata": self._metadata}
        _HandlePickler(buffer, protocol=4).dump(content)
        return base64.b64encode(buffer.getvalue()).decode("ascii")


def filled_bucket(named: Sequence[tuple[str, torch.Tensor]], dtype_of: DtypeOf) -> Bucket:
    """A bucket with these tensors, each in the dtype in which it travels.

    Raises:
        RuntimeError, MemoryError: there is no memory for it.
    """
    bucket = Bucket([(name, tuple(tensor.shape), dtype_of(tensor)) for name, tensor in named])
    for index, (_, tensor) in enumerate(named):
        bucket.fill(index, tensor)
    return bucket


class _HandlePickler(pickle.Pickler):
    """Writes handles for tensors, whatever strategy torch uses elsewhere in this process."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            place = (obj.storage_offset(), obj.size(), obj.stride(), False)
            return rebuild_tensor, (torch.Tensor, obj._typed_storage(), place)
        if isinstance(obj, torch.TypedStorage):
            return rebuild_typed_storage, (obj._untyped_storage, obj.dtype)
        if isinstance(obj, torch.UntypedStorage):
            handle = obj._share_filename_cpu_()
            obj._shared_incref()
            return rebuild_storage_filename, (torch.UntypedStorage, *handle)
        return NotImplemented
