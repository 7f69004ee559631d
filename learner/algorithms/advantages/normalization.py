"""Centring and scaling of rewards over groups or over the batch.

Invariants: values that are all equal come out as exactly 0, in any dtype. Means are taken of the distances to the
smallest value, so that rounding adds nothing. A NaN is a reward that does not apply: it enters no statistic and comes
out as 0. Nothing else comes out as NaN or Inf from finite input.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rollmesh.learner.algorithms.ragged import segment_count, segment_max, segment_min, segment_sum

Level = Literal["none", "group", "batch"]
"""The values over which a statistic is taken."""
Single = Literal["reward", "zero"]
"""The advantage of the only member of a group: its reward as it is (no baseline), or 0 (nothing to compare with)."""


def centre(
    values: Tensor, group_ids: Tensor, count: int, *, level: Level = "group", leave_one_out: bool = False
) -> Tensor:
    """Values minus a mean.

    Args:
        values: float [S].
        group_ids: int64 [S], 0 .. count-1.
        count: number of groups.
        level: of the mean; `none`: nothing is subtracted.
        leave_one_out: the mean is that of the others; alone: the difference is 0.

    Returns:
        float [S]; 0 where the value is NaN.
    """
    known = ~values.isnan()
    if level == "none":
        return torch.where(known, values, 0.0)
    segments, count = _segments(group_ids, count, level)
    floors = segment_min(torch.where(known, values, torch.inf), segments, count)
    above = torch.where(known, values - floors[segments], 0.0)
    sizes = segment_sum(known.to(values.dtype), segments, count)[segments]
    total = segment_sum(above, segments, count)[segments]
    if leave_one_out:
        difference = torch.where(sizes > 1, above - (total - above) / (sizes - 1).clamp_min(1), 0.0)
    else:
        difference = above - total / sizes.clamp_min(1)
    return torch.where(known, difference, 0.0)


def deviation(
    centred: Tensor, known: Tensor, group_ids: Tensor, count: int, *, level: Level = "group", correction: int = 1
) -> Tensor:
    """Root of the mean square of values that are centred already, at every value.

    Args:
        centred: float [S], 0 where not known.
        known: bool [S], values that count.
        group_ids: int64 [S].
        count: number of groups.
        level: over what the mean is taken; `none`: 1.
        correction: subtracted from the number of values (1: Bessel's).

    Returns:
        float [S]; 0 where there are `correction` values or fewer.
    """
    if level == "none":
        return torch.ones_like(centred)
    segments, count = _segments(group_ids, count, level)
    sizes = segment_sum(known.to(centred.dtype), segments, count)
    squares = segment_sum(centred.square(), segments, count)
    freedom = sizes - correction
    return torch.where(freedom > 0, (squares / freedom.clamp_min(1)).sqrt(), 0.0)[segments]


def normalize(
    values: Tensor,
    group_ids: Tensor,
    count: int,
    *,
    mean: Level = "group",
    std: Level = "group",
    leave_one_out: bool = False,
    correction: int = 1,
    epsilon: float = 1e-6,
    around: Literal["own", "subtracted"] = "own",
    single: Single = "zero",
) -> Tensor:
    """(x - mean) / (std + epsilon).

    Args:
        values: float [S]; NaN: does not apply.
        group_ids: int64 [S].
        count: number of groups.
        mean: over what the mean is taken; none: 0.
        std: over what the standard deviation is taken; none: not divided.
        leave_one_out: the mean subtracted leaves the value itself out.
        correction: of the variance; 1: the sample's, 0: the population's.
        epsilon: keeps small deviations from blowing up noise.
        around: the deviation is taken around the mean over its own level, or around the mean that was subtracted.
        single: the value of a group of one, where the mean is over groups.

    Returns:
        float [S].
    """
    known = ~values.isnan()
    centred = centre(values, group_ids, count, level=mean, leave_one_out=leave_one_out)
    own = mean == std and not leave_one_out
    reference = centred if own or around == "subtracted" else centre(values, group_ids, count, level=std)
    scale = deviation(reference, known, group_ids, count, level=std, correction=correction)
    if single == "reward" and mean == "group":
        alone = is_alone(group_ids, count) & known
        centred = torch.where(alone, values, centred)
        if std == "group":
            scale = torch.where(alone, 1.0, scale)
    return divide(centred, scale if std == "none" else scale + epsilon)


def with_singles(centred: Tensor, rewards: Tensor, group_ids: Tensor, count: int, single: Single) -> Tensor:
    """Centred rewards [S], with the reward itself for groups of one if `single` asks for that."""
    return centred if single == "zero" else torch.where(is_alone(group_ids, count), rewards, centred)


def is_alone(group_ids: Tensor, count: int) -> Tensor:
    """bool [S], True for the only member of a group."""
    return segment_count(group_ids, count)[group_ids] == 1


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Quotient; 0 where the denominator is 0."""
    zero = denominator == 0
    return torch.where(zero, 0.0, numerator / torch.where(zero, 1.0, denominator))


def share_of_largest(values: Tensor, group_ids: Tensor, count: int) -> Tensor:
    """Values >= 0 divided by the largest of their group, [S]; 0 where that is 0."""
    return divide(values, segment_max(values, group_ids, count)[group_ids])


def _segments(group_ids: Tensor, count: int, level: Level) -> tuple[Tensor, int]:
    return (group_ids, count) if level == "group" else (torch.zeros_like(group_ids), 1)
