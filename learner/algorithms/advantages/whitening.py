"""Whitening: advantages of a batch to mean 0 and variance 1.

Invariants: values that are all equal, or only one, come out as exactly 0. An empty batch stays empty. Values that the
caller leaves out have no influence on the others.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

# verl's guard against empty masks, which its numbers contain; below the resolution of float32.
_COUNT_SLACK = 1e-8


def whiten(
    values: Tensor,
    *,
    keep: Tensor | None = None,
    epsilon: float = 1e-8,
    guard: Literal["variance", "deviation"] = "variance",
    shift_mean: bool = True,
) -> Tensor:
    """(x - mean) / sqrt(var + epsilon), over all values of the batch; sums are accumulated in float64.

    Args:
        values: float [N], advantages of all tokens (or sequences).
        keep: bool [N], False for values that are rejected: they enter no statistic. None: all are kept.
        epsilon: lower bound of the divisor; 1e-8 in verl and slime, 1e-5 in AReaL (added to the deviation).
        guard: epsilon is added to the variance, or to the deviation: (x - mean) / (std + epsilon).
        shift_mean: False gives the values their mean back: only their spread changes.

    Returns:
        float [N], in the dtype of the values. The variance has Bessel's correction.
    """
    counted = values if keep is None else values[keep]
    number = counted.numel()
    if number < 2:
        return torch.zeros_like(values) if shift_mean else values.clone()
    mean = counted.sum(dtype=torch.float64) / (number + _COUNT_SLACK)
    square = (counted - mean).square().sum(dtype=torch.float64) / (number + _COUNT_SLACK)
    variance = square * (number / (number - 1))
    scale = (variance + epsilon).rsqrt() if guard == "variance" else 1.0 / (variance.sqrt() + epsilon)
    flat = counted.max() == counted.min()
    whitened = torch.where(flat, 0.0, (values - mean) * scale.to(values.dtype))
    return whitened if shift_mean else whitened + mean.to(values.dtype)
