"""The unfolding of packed tokens into rows of one sequence each: pure index arithmetic.

For models that carry state from token to token outside attention, or whose attention is their own. Rows are padded on
the right, so a model that only looks back computes every real token as if its sequence were alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollmesh.learner.batching.sequences import whole_sequences
from rollmesh.learner.batching.transfer import to_device
from rollmesh.learner.batching.types import Segments


@dataclass(frozen=True, slots=True)
class RowsLayout:
    """S rows of L tokens.

    Attributes:
        tokens: int64 [S, L], places among the N packed tokens; padding repeats place 0.
        sources: int64 [S * L], the same on the host; -1: padding.
        places: int64 [N], where each packed token stands among the S * L; one place of those that a prompt has.
    """

    tokens: Tensor
    sources: NDArray[np.int64]
    places: Tensor


def build_rows(segments: Segments, device: torch.device) -> RowsLayout:
    """Builds one row for every sequence.

    Args:
        segments: of the packed micro-batch.
        device: where the indices go.
    """
    sequences = whole_sequences(segments)
    tokens, real = sequences.in_rows(np.arange(len(sequences.lengths)))
    places = np.zeros(int(segments.lengths.sum()), dtype=np.int64)
    places[tokens[real]] = np.flatnonzero(real.ravel())
    return RowsLayout(to_device(tokens, device), np.where(real, tokens, -1).ravel(), to_device(places, device))
