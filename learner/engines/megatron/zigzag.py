"""The division of sequences among context-parallel processes: pure index arithmetic.

Each sequence is cut into 2 * size chunks of equal length. Process r has chunks r and 2 * size - 1 - r ("zig-zag", as in
Megatron-Core and Transformer Engine). So all do the same work, although later tokens see more of the others.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def padded_lengths(lengths: NDArray[np.int64], size: int, tensor_parallel: int) -> NDArray[np.int64]:
    """Lengths of sequences with padding at their ends, so that they can be divided.

    Args:
        lengths: int64 [S], tokens of each sequence.
        size: context-parallel processes.
        tensor_parallel: processes that divide each one's tokens again.

    Returns:
        int64 [S]: multiples of `2 * size` where sequences are divided; a process has a multiple of `tensor_parallel`.
    """
    unit = 2 * size if size > 1 else 1
    padded = -(-lengths // unit) * unit
    whole = int(np.lcm(unit, size * tensor_parallel))
    padded[-1] += -int(padded.sum()) % whole
    return np.asarray(padded)


def places_of(lengths: NDArray[np.int64], size: int, rank: int) -> NDArray[np.int64]:
    """The tokens of a process, as places among those of all sequences side by side.

    Args:
        lengths: int64 [S], padded.
        size: context-parallel processes.
        rank: of the process.

    Returns:
        int64 [T / size].
    """
    ends = lengths.cumsum()
    if size == 1:
        return np.arange(int(ends[-1]))
    chunks = lengths // (2 * size)
    first = np.arange(int(chunks.sum())) + np.repeat(ends - lengths - (chunks.cumsum() - chunks), chunks)
    parts = np.split(first, chunks.cumsum()[:-1])
    return np.concatenate(
        [
            part + place * chunk
            for part, chunk in zip(parts, chunks, strict=True)
            for place in (rank, 2 * size - 1 - rank)
        ]
    )
