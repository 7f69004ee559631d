"""A set of weights in memory that vLLM's processes can map: one copy, and nothing left at the end.

Weights that lie in a file of the learner's stay there, and the file is mapped once more. Others are copied, to memory
without a name outside `/proc/<pid>/fd`: it is gone with the process that made it. It has no limit but the machine's (a
container's /dev/shm has 64 MB).
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.weights.shared_files import SHARED_MEMORY, is_shared_file
from rollmesh.mesh.weights.tensors import dtype_name

_ALIGN = 64
_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True, slots=True)
class SharedLayout:
    """The tensors and their offsets; plain numbers and text, as vLLM's messages carry them.

    Attributes:
        path: to open the memory under, by any process of the same user on this host.
        nbytes: of all of it.
        names, dtypes, shapes, offsets: of each tensor; offsets in bytes.
    """

    path: str
    nbytes: int
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]


class SharedWeights:
    """Memory that holds one set of weights, until it is closed.

    Attributes:
        layout: of the tensors in it.
        copied_bytes: that were copied to it; 0 where it is the learner's own file.

    Raises:
        WeightsError: there is no memory for it.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        file = find_file(tensors.values())
        if file is not None:
            self._descriptor, offsets, end = file.descriptor, file.offsets, file.nbytes
        else:
            offsets, end = [], 0
            for tensor in tensors.values():
                offsets.append(end)
                end += -(-tensor.nbytes // _ALIGN) * _ALIGN
            self._descriptor = os.memfd_create("rollmesh-weights", os.MFD_CLOEXEC)
        self.copied_bytes = 0 if file is not None else end
        self.layout = SharedLayout(
            path=f"/proc/{os.getpid()}/fd/{self._descriptor}",
            nbytes=end,
            names=list(tensors),
            dtypes=[dtype_name(tensor.dtype) for tensor in tensors.values()],
            shapes=[list(tensor.shape) for tensor in tensors.values()],
            offsets=offsets,
        )
        if file is not None:
            return
        try:
            self._fill(tensors)
        except (OSError, RuntimeError, MemoryError) as error:
            self.close()
            raise WeightsError(
                f"no memory for {end} bytes of weights next to those in service: {error}",
                hint="the old ones stay in service",
            ) from error

    @property
    def origin(self) -> str:
        """The memory, in words."""
        return f"a copy of {self.copied_bytes >> 20} MiB" if self.copied_bytes else "the learner's own file"

    def close(self) -> None:
        """Gives the memory back, once no process has it mapped any more; may be called twice."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if self.layout.nbytes == 0:
            return
        # Missing pages are an error here, and a signal where they are first written to.
        os.posix_fallocate(self._descriptor, 0, self.layout.nbytes)
        area = torch.frombuffer(mmap.mmap(self._descriptor, self.layout.nbytes), dtype=torch.uint8)
        for offset, tensor in zip(self.layout.offsets, tensors.values(), strict=True):
            if tensor.nbytes:
                place = area[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                place.copy_(tensor.detach())


def map_tensors(layout: SharedLayout) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a layout, in memory that is shared with its maker; changes to them stay in this process.

    Raises:
        WeightsError: the memory cannot be opened, or is not what the layout says.
    """
    try:
        descriptor = os.open(layout.path, os.O_RDONLY)
        try:
            size = os.fstat(descriptor).st_size
            area = mmap.mmap(descriptor, layout.nbytes, access=mmap.ACCESS_COPY) if layout.nbytes else b""
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise WeightsError(f"the weights at {layout.path} cannot be mapped: {error}") from error
    if size != layout.nbytes:
        raise WeightsError(f"{size} bytes of weights at {layout.path}, expected {layout.nbytes}")
    tensors = []
    for name, dtype_text, shape, offset in zip(layout.names, layout.dtypes, layout.shapes, layout.offsets, strict=True):
        dtype = getattr(torch, dtype_text, None)
        if not isinstance(dtype, torch.dtype):
            raise WeightsError(f"tensor {name!r} has the unknown dtype {dtype_text!r}")
        count = torch.Size(shape).numel()
        if offset < 0 or offset + count * dtype.itemsize > layout.nbytes:
            raise WeightsError(f"tensor {name!r} lies outside the memory of {layout.nbytes} bytes")
        flat = torch.frombuffer(area, dtype=dtype, count=count, offset=offset) if count else torch.empty(0, dtype=dtype)
        tensors.append((name, flat.view(shape)))
    return tensors


@dataclass(frozen=True, slots=True)
class MappedFile:
    """An open file, and where tensors lie in it.

    Attributes:
        descriptor: its owner's to close.
        nbytes: of the file.
        offsets: of each tensor, in bytes.
    """

    descriptor: int
    nbytes: int
    offsets: list[int]


@dataclass(frozen=True, slots=True)
class _Area:
    """A mapping of this process: addresses, and the part of a file."""

    begin: int
    end: int
    offset: int
    inode: int
    path: str

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """The offset of a tensor in the file; None where it lies elsewhere, or not in one piece."""
        if tensor.nbytes == 0:
            return 0
        at = tensor.data_ptr()
        inside = self.begin <= at and at + tensor.nbytes <= self.end
        offset = at - self.begin + self.offset
        return offset if inside and tensor.is_contiguous() and offset % tensor.element_size() == 0 else None


def find_file(tensors: Iterable[torch.Tensor], directory: Path = SHARED_MEMORY) -> MappedFile | None:
    """Finds and opens the file that holds all of these tensors as they are.

    Args:
        tensors: on the CPU.
        directory: the tmpfs in which publishers of this host have their files.

    Returns:
        None where they do not all lie in one file of a publisher that still has its name.
    """
    listed = list(tensors)
    largest = max(listed, key=lambda tensor: tensor.nbytes, default=None)
    area = _area_of(largest.data_ptr()) if largest is not None and largest.nbytes else None
    if area is None or not is_shared_file(area.path, directory):
        return None
    offsets = [area.offset_of(tensor) for tensor in listed]
    found = [offset for offset in offsets if offset is not None]
    if len(found) < len(offsets):
        return None
    with contextlib.suppress(OSError):
        descriptor = os.open(area.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        if status.st_ino == area.inode:
            return MappedFile(descriptor, status.st_size, found)
        os.close(descriptor)
    return None


def _area_of(address: int) -> _Area | None:
    for line in _MAPS.read_text().splitlines():
        addresses, _, offset, _, inode, *path = line.split(maxsplit=5)
        begin, end = (int(number, 16) for number in addresses.split("-"))
        if begin <= address < end:
            return _Area(begin, end, int(offset, 16), int(inode), path[0] if path else "")
    return None
