"""Bounds on log-ratios and log-probs, which keep formulas finite.

A sampled token can have probability 0 under another policy (log-prob -inf), and log-ratios of long drifts overflow
exp(). Bounded values have the gradient 0, as if the token were clipped.
"""

from __future__ import annotations

import torch
from torch import Tensor

# exp(20) = 4.9e8 is finite in float32 with room for a sum over tokens; the same bound as verl's.
MAX_LOG_RATIO = 20.0
# Stands for log 0: finite after multiplication with an advantage and a sum over tokens.
MIN_LOG_PROB = -1e4


def log_ratio(numerator: Tensor, denominator: Tensor, bound: float = MAX_LOG_RATIO) -> Tensor:
    """log(p / q) within +-bound; 0 where both are impossible."""
    return torch.nan_to_num(numerator - denominator, nan=0.0, posinf=bound, neginf=-bound).clamp(-bound, bound)


def finite_log_probs(log_probs: Tensor) -> Tensor:
    """Log-probs with `MIN_LOG_PROB` in place of -inf (gradient 0 there)."""
    return torch.nan_to_num(log_probs, nan=MIN_LOG_PROB, posinf=0.0, neginf=MIN_LOG_PROB)
