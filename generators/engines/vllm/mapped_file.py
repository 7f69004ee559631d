"""The publisher's file in which received tensors lie, where they are mapped from one: nothing has to be copied then."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from rollmesh.mesh.weights.shared_files import SHARED_MEMORY, is_shared_file

_MAPS = Path("/proc/self/maps")


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
