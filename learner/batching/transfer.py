"""Copies of host arrays to the device, without waiting for the device's queued work."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The array as a tensor on a device.

    A plain copy to CUDA makes the host wait until the device has done everything before it. One from pinned memory is
    queued like a kernel.

    Args:
        array: not written to afterwards; on the CPU the tensor shares its memory where the dtype agrees.
        device: where it goes.
        dtype: of the tensor; none: the array's.
    """
    tensor = torch.from_numpy(array).to(dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
