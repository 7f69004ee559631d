"""Rotary positions of packed sequences on a CPU: Megatron's arithmetic, with one look-up in place of a loop over them.

Invariant: what is kept for the backward pass is what Megatron's own code keeps, so that plans of memory hold.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollmesh.learner.engines.megatron.zigzag import places_of


def rotate_packed(tokens: Tensor, cu_seqlens: Tensor, angles: Tensor, *, cp_group: Any, **settings: Any) -> Tensor:
    """Turns queries or keys by the angles of their positions (arXiv:2104.09864).

    Args:
        tokens: [t, heads, width], of this process, sequence after sequence.
        cu_seqlens: int32 [S + 1], where sequences begin.
        angles: float32 [longest, 1, 1, width], by position.
        cp_group: processes that divide each sequence.
        settings: of Megatron's function for one sequence.

    Returns:
        As `tokens`.
    """
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    places = _positions(tuple(cu_seqlens.diff().tolist()), cp_group.size(), cp_group.rank())
    rotated: Tensor = _apply_rotary_pos_emb_bshd(tokens[:, None], angles[places], **settings)
    return rotated[:, 0]


# All layers ask for the same ones.
@functools.lru_cache(maxsize=8)
def _positions(lengths: tuple[int, ...], size: int, rank: int) -> Tensor:
    """int64 [t], positions of this process's tokens in their sequences."""
    sizes = np.array(lengths, dtype=np.int64)
    places = np.arange(int(sizes.sum())) - np.repeat(sizes.cumsum() - sizes, sizes)
    return torch.from_numpy(places[places_of(sizes, size, rank)])
