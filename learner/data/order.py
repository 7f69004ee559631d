"""The order of the prompts: a pure function of (seed, data, ordinal).

Ordinals count the prompts of a run over all epochs, from 1. Ordinal `o` lies in epoch `(o - 1) // rows`, at position
`(o - 1) % rows` of that epoch's permutation. Invariant: the same seed and data give the same row for an ordinal,
on every machine and after every restart. So a cursor is one integer.

Rows of large files are read in blocks, of which memory holds a few, the window. Then an epoch permutes the blocks, and
permutes the rows within each successive window of them.
"""

from __future__ import annotations

import bisect
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollmesh.learner.data.records import Blocks

Indices = NDArray[np.int64]


class Order(Protocol):
    """Maps ordinals to rows."""

    @property
    def rows(self) -> int:
        """Rows of the data."""
        ...

    @property
    def last_ordinal(self) -> int | None:
        """The last ordinal of the run; None for no end."""
        ...

    def locate(self, ordinal: int) -> tuple[int, int]:
        """(epoch, row) of an ordinal; no two ordinals have both in common.

        Raises:
            IndexError: below 1 or after the last epoch.
        """
        ...


class DataOrder:
    """The order of one source's rows.

    Args:
        rows: of the source, at least 1.
        seed: seed of the permutations.
        shuffle: False keeps the order of the file in every epoch.
        epochs: passes over the data; None for no end.
        blocks: rows that are read together; None: any row can be read alone.
        stream: sources with different ones have independent permutations.
    """

    def __init__(
        self,
        rows: int,
        *,
        seed: int,
        shuffle: bool,
        epochs: int | None,
        blocks: Blocks | None = None,
        stream: int = 0,
    ) -> None:
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._last = None if epochs is None else epochs * rows
        self._stream = stream
        self._blocks = blocks
        self._epoch: tuple[int, Indices | _Windows] | None = None

    @property
    def last_ordinal(self) -> int | None:
        return self._last

    @property
    def rows(self) -> int:
        return self._rows

    def locate(self, ordinal: int) -> tuple[int, int]:
        if ordinal < 1 or (self._last is not None and ordinal > self._last):
            raise IndexError(f"ordinal {ordinal} is not in 1 .. {self._last}")
        epoch, position = divmod(ordinal - 1, self._rows)
        return epoch, int(self._permutation(epoch)[position]) if self._shuffle else position

    def _permutation(self, epoch: int) -> Indices | _Windows:
        if self._epoch is None or self._epoch[0] != epoch:
            seeds = [self._seed, epoch, self._stream]
            made = _permuted(self._rows, seeds) if self._blocks is None else _Windows(self._blocks, seeds)
            self._epoch = (epoch, made)
        return self._epoch[1]


class _Windows:
    """The permutation of one epoch of blocks; that of one window is held at a time."""

    def __init__(self, blocks: Blocks, seeds: list[int]) -> None:
        self._seeds = seeds
        sizes = np.asarray(blocks.sizes, dtype=np.int64)
        starts = np.cumsum(sizes) - sizes
        order = _permuted(len(sizes), seeds)
        chosen = [order[first : first + blocks.window] for first in range(0, len(order), blocks.window)]
        self._windows = [[(int(starts[block]), int(sizes[block])) for block in window] for window in chosen]
        self._ends = list(accumulate(sum(size for _, size in window) for window in self._windows))
        self._held: tuple[int, Indices] | None = None

    def __getitem__(self, position: int) -> int:
        window = bisect.bisect_right(self._ends, position)
        if self._held is None or self._held[0] != window:
            rows = np.concatenate([np.arange(start, start + size) for start, size in self._windows[window]])
            self._held = (window, rows[_permuted(len(rows), [*self._seeds, window + 1])])
        return int(self._held[1][position - (self._ends[window - 1] if window else 0)])


def _permuted(count: int, seeds: list[int]) -> Indices:
    return np.random.Generator(np.random.PCG64(seeds)).permutation(count)
