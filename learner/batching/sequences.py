"""Whole sequences in a packed micro-batch, each response with its prompt: pure index arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollmesh.learner.batching.types import Segments


@dataclass(frozen=True, slots=True)
class Sequences:
    """Every response after its prompt, and every prompt that no response continues; S sequences.

    Attributes:
        starts: int64 [S], first place of what follows the prompt.
        prefix_starts: int64 [S], first place of the prompt.
        prefix_lengths: int64 [S], its tokens; 0 where nothing continues it.
        lengths: int64 [S], all tokens.
    """

    starts: NDArray[np.int64]
    prefix_starts: NDArray[np.int64]
    prefix_lengths: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def in_rows(self, members: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Places of some sequences' tokens, int64 [M, L], padded with 0; and which of them are real."""
        column = np.arange(int(self.lengths[members].max()))
        prefixes = self.prefix_lengths[members, None]
        real = column < self.lengths[members, None]
        of_prompt = self.prefix_starts[members, None] + column
        tokens = np.where(column < prefixes, of_prompt, self.starts[members, None] + column - prefixes)
        return np.where(real, tokens, 0), real

    def side_by_side(self) -> NDArray[np.int64]:
        """Places of all tokens, int64 [M], sequence after sequence."""
        owner = np.repeat(np.arange(len(self.lengths)), self.lengths)
        offset = np.arange(len(owner)) - (self.lengths.cumsum() - self.lengths)[owner]
        prefixes = self.prefix_lengths[owner]
        return np.where(offset < prefixes, self.prefix_starts[owner] + offset, self.starts[owner] + offset - prefixes)


def whole_sequences(segments: Segments) -> Sequences:
    """The sequences of a packed micro-batch."""
    continued = set(segments.prefix_starts[segments.prefix_lengths > 0].tolist())
    alone = np.array([start not in continued for start in segments.starts.tolist()])
    chosen = (segments.prefix_lengths > 0) | alone
    prefixes = segments.prefix_lengths[chosen]
    return Sequences(
        segments.starts[chosen], segments.prefix_starts[chosen], prefixes, prefixes + segments.lengths[chosen]
    )
