"""Responses that computed tokens belong to: pure index arithmetic.

A prompt is computed once for several responses, or once for each, as engine and packing have it. Sums over tokens do
not depend on that where each computed token counts as often as responses have it, divided by its copies.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollmesh.learner.batching.types import PackedRow


def count_tokens(row: PackedRow) -> int:
    """Tokens of all trained sequences of a row, as if each was computed with its own prompt."""
    return int((row.responses * row.segments.lengths).sum())


def responses_of_tokens(row: PackedRow) -> NDArray[np.float32]:
    """The responses that each packed token belongs to, [N]."""
    return np.repeat(row.responses, row.segments.lengths).astype(np.float32)


def divide_over_copies(responses: NDArray[np.float32], places: NDArray[np.int64]) -> NDArray[np.float32]:
    """The same where a token may be computed several times: its copies have equal parts.

    Args:
        responses: of the packed tokens, [N].
        places: int64 [M], the packed token of each computed one; -1: padding.

    Returns:
        [M], 0 for padding.
    """
    real = places >= 0
    copies = np.bincount(places[real], minlength=len(responses))
    found = responses[places] / np.maximum(copies[places], 1)
    return np.where(real, found, 0.0).astype(np.float32)
