"""Tensors' memory, moved to the host and back in place: every tensor stays the object that it is.

The bytes of a storage go to host memory, and its own memory is given back: to the device's driver, not only to torch's
allocator. On CUDA the host memory is pinned, in slabs, and kept for the next time; copies are asynchronous. Torch
rounds pinned memory up to powers of two, so a slab is one. On a CPU the slabs are as much memory as is given back.
A file takes their place if others are to use that memory.

Invariants: while memory is moved, each byte is held once, but for one slab on a CPU. A move to a file that fails leaves
all of it in memory, or ends with `LostTensorsError`. A move from a file or from pinned memory that fails leaves all of
it there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from rollmesh.learner.engines.rest_file import RestFile
from rollmesh.mesh.runtime.memory_tuning import return_freed_memory

SLAB_BYTES = 64 << 20
"""Size of a slab; a power of two. The last one may be smaller."""


class HostCopy:
    """Memory of some tensors, on their device or in host memory.

    Args:
        device: of the tensors.
        folder: of the files that take the memory's place on a CPU; None: it stays in memory.
        constant: the tensors never change, so the host's bytes are good for the next time too.
    """

    def __init__(self, device: torch.device, folder: Path | None = None, *, constant: bool = False) -> None:
        self._device = device
        # Slabs on a CPU are given up piece by piece.
        self._keeps = constant and (folder is not None or device.type == "cuda")
        # Storages whose bytes the host has still. They are held: the address of one that is gone may become another's.
        self._kept: list[UntypedStorage] = []
        self._file = RestFile(folder) if folder is not None and device.type == "cpu" else None
        self._moved: list[tuple[UntypedStorage, int]] = []
        self._slabs: list[Tensor] = []

    @property
    def moved(self) -> bool:
        """The memory is on the host: the tensors cannot be read."""
        return bool(self._moved)

    @property
    def nbytes(self) -> int:
        """Bytes that are on the host."""
        return sum(size for _, size in self._moved)

    def to_host(self, tensors: Iterable[Tensor]) -> None:
        """Moves the tensors' memory; nothing happens where it has moved before. `return_free_memory` belongs after it.

        Args:
            tensors: those that share memory move it together; memory outside of the device stays.

        Raises:
            SwapError: the folder has no room.
            LostTensorsError: it has lost what it has taken.
        """
        if self._moved:
            return
        storages = [(storage, storage.nbytes()) for storage in self._storages(tensors)]
        kept, self._kept = self._kept, []
        if kept and _addresses(kept) == _addresses(storage for storage, _ in storages):
            for storage, _ in storages:
                storage.resize_(0)
        elif self._file is None:
            self._fill_slabs(storages)
        elif storages:
            self._file.take(storages)
        self._moved = storages

    def to_device(self) -> None:
        """Brings the memory back; the copies are done before what the present stream does next.

        Raises:
            RuntimeError: there is no room on the device.
        """
        if self._file is None:
            self._empty_slabs(self._moved)
        elif self._moved:
            self._file.restore(self._moved, keep=self._keeps)
        if self._keeps and self._moved:
            self._kept = [storage for storage, _ in self._moved]
        self._moved = []

    def forget(self) -> None:
        """Gives the moved bytes up: the tensors are of no use any more."""
        self._moved, self._kept = [], []
        if self._file is not None:
            self._file.close()
        if self._device.type == "cpu":
            self._slabs.clear()

    def _fill_slabs(self, storages: Sequence[tuple[UntypedStorage, int]]) -> None:
        for storage, pieces in zip(storages, self._pieces([size for _, size in storages]), strict=True):
            data = _bytes_of(storage[0])
            for start, piece in pieces:
                piece.copy_(data[start : start + len(piece)], non_blocking=True)
            del data
            # The allocator hands memory out again in the order of the stream: after the copy.
            storage[0].resize_(0)

    def _empty_slabs(self, moved: Sequence[tuple[UntypedStorage, int]]) -> None:
        done = 0
        for (storage, size), pieces in zip(moved, self._pieces([size for _, size in moved]), strict=True):
            self._allocate(storage, size, moved)
            data = _bytes_of(storage)
            for start, piece in pieces:
                data[start : start + len(piece)].copy_(piece, non_blocking=True)
            done += size
            if self._device.type == "cpu":
                del piece, pieces
                self._slabs[: done // SLAB_BYTES] = [torch.empty(0, dtype=torch.uint8)] * (done // SLAB_BYTES)
        if self._device.type == "cpu":
            self._slabs.clear()
            return_freed_memory()

    def _allocate(self, storage: UntypedStorage, size: int, moved: Sequence[tuple[UntypedStorage, int]]) -> None:
        try:
            storage.resize_(size)
        except RuntimeError:
            if self._device.type == "cuda":
                # The slabs have all of it still.
                for brought, _ in moved:
                    brought.resize_(0)
            raise

    def _storages(self, tensors: Iterable[Tensor]) -> list[UntypedStorage]:
        """Each storage once, in the order of the tensors."""
        found: dict[int, UntypedStorage] = {}
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            if local.device.type != self._device.type:
                continue
            if not local.untyped_storage().resizable():
                # A part of a mapped file.
                tensor.data = local = local.detach().clone()
            storage = local.untyped_storage()
            if storage.nbytes():
                found.setdefault(storage._cdata, storage)
        return list(found.values())

    def _pieces(self, sizes: Sequence[int]) -> Iterator[list[tuple[int, Tensor]]]:
        """The places of runs of bytes in the slabs, one after another: per run, offsets in it and parts of slabs."""
        place, total = 0, sum(sizes)
        for size in sizes:
            pieces, start = [], 0
            while start < size:
                index, offset = divmod(place, SLAB_BYTES)
                length = min(size - start, SLAB_BYTES - offset)
                pieces.append((start, self._slab(index, total)[offset : offset + length]))
                start, place = start + length, place + length
            yield pieces

    def _slab(self, index: int, total: int) -> Tensor:
        pinned = self._device.type == "cuda"
        size = min(SLAB_BYTES, total - index * SLAB_BYTES)
        if index < len(self._slabs) and len(self._slabs[index]) < size:
            # Kept from a smaller total.
            del self._slabs[index:]
        while len(self._slabs) <= index:
            size = min(SLAB_BYTES, total - len(self._slabs) * SLAB_BYTES)
            size = 1 << (size - 1).bit_length() if pinned else size
            self._slabs.append(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))
        return self._slabs[index]


def return_free_memory(device: torch.device) -> None:
    """Gives memory that has become free back to the system, or to the device's driver; waits for copies."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    else:
        return_freed_memory()


def _addresses(storages: Iterable[UntypedStorage]) -> list[int]:
    return [storage._cdata for storage in storages]


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
