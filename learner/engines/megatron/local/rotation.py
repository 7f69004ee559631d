"""Rotary positions of packed sequences on a CPU: one look-up for all in place of Megatron's loop over sequences."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import embedding

from rollmesh.learner.engines.megatron.zigzag import places_of


def rotate_packed(
    tokens: Tensor, cu_seqlens: Tensor, angles: Tensor, *_: Any, mscale: float = 1.0, cp_group: Any, **__: Any
) -> Tensor:
    """Turns queries or keys by the angles of their positions (arXiv:2104.09864), all dimensions of a head.

    Args:
        tokens: [t, heads, width], of this process, sequence after sequence.
        cu_seqlens: int32 [S + 1], where sequences begin.
        angles: float32 [longest, 1, 1, width], by position; both halves of the width have the same.
        mscale: factor of the result.
        cp_group: processes that divide each sequence.

    Returns:
        As `tokens`.
    """
    places = _positions(tuple(cu_seqlens.diff().tolist()), cp_group.size(), cp_group.rank())
    half = angles[:, 0, 0].chunk(2, dim=-1)[0]
    cosines, sines = (embedding(places, (of * mscale).to(tokens.dtype))[:, None] for of in (half.cos(), half.sin()))
    first, second = tokens.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


# All layers ask for the same ones.
@functools.lru_cache(maxsize=8)
def _positions(lengths: tuple[int, ...], size: int, rank: int) -> Tensor:
    """int64 [t], positions of this process's tokens in their sequences."""
    sizes = np.array(lengths, dtype=np.int64)
    places = np.arange(int(sizes.sum())) - np.repeat(sizes.cumsum() - sizes, sizes)
    return torch.from_numpy(places[places_of(sizes, size, rank)])
