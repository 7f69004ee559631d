"""Policy filtration (PF-PPO): sequences are trained as often as their reward can be trusted.

Shen et al., "Policy Filtration for RLHF to Mitigate Noise in Reward Models", arXiv:2409.06957. A reward model is most
reliable at its extremes. So a batch of S sequences is replaced by S draws with replacement, weighted by the reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rollmesh.learner.algorithms.ragged import segment_count
from rollmesh.learner.algorithms.settings import Settings, SettingsError

ResampleMethod = Literal["none", "pow", "max_min", "max_random"]
# Added to every weight, so that a batch of zero rewards can be drawn from.
_FLOOR = 1e-8


@dataclass(frozen=True)
class ResampleSettings(Settings):
    """The resampling of a batch.

    Attributes:
        method: `none`; `pow`: |reward|^weight_pow; `max_min`: only the batch's best and worst; `max_random`: the best
            with weight 0.4, the others 0.1.
        weight_pow: exponent of `pow`.
    """

    method: ResampleMethod = "none"
    weight_pow: float = 2.0

    def __post_init__(self) -> None:
        if self.weight_pow < 0:
            raise SettingsError("weight_pow", "must not be negative")


def pf_ppo_weights(scores: Tensor, method: ResampleMethod, weight_pow: float = 2.0) -> Tensor:
    """Unnormalized weights of the draws.

    Args:
        scores: float [S], rewards.
        method: see `ResampleSettings`; `none` weighs all alike.
        weight_pow: exponent of `pow`.

    Returns:
        float [S], positive.
    """
    if method == "none" or not scores.numel():
        return torch.ones_like(scores)
    if method == "pow":
        return scores.abs().pow(weight_pow) + _FLOOR
    best = scores == scores.max()
    if method == "max_min":
        return (best | (scores == scores.min())).to(scores.dtype) + _FLOOR
    return torch.where(best, 0.4, 0.1).to(scores.dtype) + _FLOOR


def resample(weights: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draws S of S sequences with replacement.

    Args:
        weights: float [S], not negative; infinite ones share all draws, and where all are 0 each counts alike.
        generator: the batch's random numbers, the same on every rank.

    Returns:
        int64 [S], how often each sequence was drawn; they sum to S.
    """
    count = weights.numel()
    if not count:
        return torch.zeros(0, dtype=torch.int64, device=weights.device)
    # On the CPU, where the generator lives; scaled, so that a sum of huge weights stays finite.
    shares = torch.nan_to_num(weights.detach().cpu().double(), nan=0.0).clamp_min(0.0)
    top = shares.max()
    shares = shares / top if top > 0 else torch.ones_like(shares)
    drawn = torch.multinomial(shares, count, replacement=True, generator=generator)
    return segment_count(drawn, count).to(weights.device)
