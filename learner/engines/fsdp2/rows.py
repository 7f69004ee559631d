"""The unfolding of packed tokens into rows of one sequence each: pure index arithmetic.

For models that carry state from token to token outside attention, or whose attention is their own. Rows are padded on
the right, so a model that only looks back computes every real token as if its sequence were alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollmesh.learner.batching.transfer import to_device
from rollmesh.learner.batching.types import Segments


@dataclass(frozen=True, slots=True)
class RowsLayout:
    """S rows of L tokens.

    Attributes:
        tokens: int64 [S, L], places among the N packed tokens; padding repeats place 0.
        places: int64 [N], where each packed token stands among the S * L; one place of those that a prompt has.
    """

    tokens: Tensor
    places: Tensor


def build_rows(segments: Segments, device: torch.device) -> RowsLayout:
    """One row for every response after its prompt, and for every prompt that no response continues.

    Args:
        segments: of the packed micro-batch.
        device: where the indices go.
    """
    continued = set(segments.prefix_starts[segments.prefix_lengths > 0].tolist())
    alone = np.array([start not in continued for start in segments.starts.tolist()])
    chosen = (segments.prefix_lengths > 0) | alone
    starts, lengths = segments.starts[chosen], segments.lengths[chosen]
    prefix_starts, prefixes = segments.prefix_starts[chosen], segments.prefix_lengths[chosen]
    totals = prefixes + lengths
    column = np.arange(int(totals.max()))
    in_prefix = column < prefixes[:, None]
    real = column < totals[:, None]
    tokens = np.where(in_prefix, prefix_starts[:, None] + column, starts[:, None] + column - prefixes[:, None])
    tokens = np.where(real, tokens, 0)
    places = np.zeros(int(segments.lengths.sum()), dtype=np.int64)
    places[tokens[real]] = np.flatnonzero(real.ravel())
    return RowsLayout(to_device(tokens, device), to_device(places, device))
