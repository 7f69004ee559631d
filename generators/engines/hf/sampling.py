"""Drawing one token per row, and its log-probability under the distribution it was drawn from.

Draws are by inverse transform: one uniform number per token, from a counter-based generator (SplitMix64, Steele, Lea
and Flood 2014). Its state is one 64-bit word per row. So a row's draws depend on its seed and its own position alone,
not on its neighbours. They cost the same for one row or many.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11))
_UNIT = 2.0**-53


def next_uniform(state: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Advances every row's generator state [n] in place and returns uniforms [n] in [0, 1)."""
    state += _GAMMA
    mixed = state ^ (state >> _SHIFTS[0])
    mixed *= _MIX_1
    mixed ^= mixed >> _SHIFTS[1]
    mixed *= _MIX_2
    mixed ^= mixed >> _SHIFTS[2]
    mixed >>= _SHIFTS[3]
    return mixed * _UNIT


def state_after(seed: int, draws: int) -> int:
    """The generator state of a row that was seeded with `seed` and has drawn so often."""
    return (seed + draws * int(_GAMMA)) % 2**64


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters of the rows of a batch; None where no row needs the treatment.

    Attributes:
        temperature: float32 [n, 1]; 1 for greedy rows.
        greedy: bool [n].
        top_k: int64 [n, 1]; 0 is off.
        top_p: float32 [n, 1]; 1 is off.
    """

    temperature: torch.Tensor | None
    greedy: torch.Tensor | None
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None


def draw(logits: torch.Tensor, uniform: torch.Tensor, sampling: RowSampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token per row.

    Args:
        logits: [n, vocabulary], any float dtype.
        uniform: float64 [n] in [0, 1).
        sampling: the rows' parameters.

    Returns:
        Token ids int64 [n] and their log-probs float32 [n].
    """
    scaled = logits.float()
    if sampling.temperature is not None:
        scaled = scaled / sampling.temperature
    log_probs = torch.log_softmax(scaled, dim=-1)
    if sampling.top_p is not None and sampling.top_k is not None:
        log_probs = _keep_top(log_probs, sampling.top_k, sampling.top_p)
    # In double precision, so that the tail of a large vocabulary is not lost to rounding.
    cumulative = log_probs.exp().cumsum(dim=-1, dtype=torch.float64)
    threshold = uniform[:, None] * cumulative[:, -1:]
    # The first entry above the threshold: it has a probability above zero.
    ids = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=log_probs.shape[-1] - 1)
    if sampling.greedy is not None:
        ids = torch.where(sampling.greedy[:, None], log_probs.argmax(dim=-1, keepdim=True), ids)
    return ids[:, 0], log_probs.gather(1, ids)[:, 0]


def _keep_top(log_probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Renormalized log-probs of the kept tokens; -inf elsewhere. top-k first, then the smallest nucleus of mass p."""
    ordered, order = log_probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    ordered = ordered.masked_fill((rank >= top_k) & (top_k > 0), -torch.inf)
    probs = torch.softmax(ordered, dim=-1)
    before = probs.cumsum(dim=-1) - probs
    # The most likely token always stays; rows with the nucleus off must not lose their tail to rounding.
    ordered = ordered.masked_fill((before >= top_p) & (top_p < 1) & (rank > 0), -torch.inf)
    kept = torch.empty_like(log_probs).scatter_(1, order, ordered)
    return torch.log_softmax(kept, dim=-1)
