"""A full tensor as processes hold it: some copies of it, each in boxes that its processes share among themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollmesh.learner.engines.tensors.boxes import Box, full_box


@dataclass(frozen=True, slots=True)
class DividedTensor:
    """A tensor that processes hold together. Every process describes all tensors, in one order.

    Attributes:
        name: Hugging Face name.
        shape, dtype: of the full tensor.
        copies: how many there are of it among all processes.
        place: gives for each process the copy that it belongs to, and its boxes in that one; perhaps none. The boxes of
            a copy's processes fill the tensor once, and none is empty. It is the same function in every process.
        local: this process's boxes, in the order of `place`; views of any strides.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    copies: int
    place: Callable[[int], tuple[int, Sequence[Box]]]
    local: Sequence[Tensor]

    def dtype_as(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which it leaves, where floating-point tensors leave in a given one."""
        return dtype if self.dtype.is_floating_point else self.dtype


def whole(name: str, tensor: Tensor, processes: int) -> DividedTensor:
    """A tensor that each of the processes has whole."""
    boxes = [full_box(tensor.shape)] if tensor.numel() else []
    return DividedTensor(
        name, tuple(tensor.shape), tensor.dtype, processes, lambda process: (process, boxes), [tensor] if boxes else []
    )
