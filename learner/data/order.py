"""The order of the prompts: a pure function of (seed, rows, ordinal).

Ordinals count the prompts of a run over all epochs, from 1. Ordinal `o` lies in epoch `(o - 1) // rows`, at position
`(o - 1) % rows` of that epoch's permutation. Invariant: the same seed and row count give the same row for an ordinal,
on every machine and after every restart. So a cursor is one integer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class DataOrder:
    """Maps ordinals to rows.

    Args:
        rows: rows of the dataset, at least 1.
        seed: seed of the permutations.
        shuffle: False keeps the order of the file in every epoch.
        epochs: passes over the data; None for no end.
    """

    def __init__(self, rows: int, *, seed: int, shuffle: bool, epochs: int | None) -> None:
        self._rows = rows
        self._seed = seed
        self._shuffle = shuffle
        self._last = None if epochs is None else epochs * rows
        self._cached: tuple[int, NDArray[np.int64]] | None = None

    @property
    def last_ordinal(self) -> int | None:
        """The last ordinal of the run; None for no end."""
        return self._last

    @property
    def rows(self) -> int:
        return self._rows

    def locate(self, ordinal: int) -> tuple[int, int]:
        """(epoch, row) of an ordinal.

        Raises:
            IndexError: below 1 or after the last epoch.
        """
        if ordinal < 1 or (self._last is not None and ordinal > self._last):
            raise IndexError(f"ordinal {ordinal} is not in 1 .. {self._last}")
        epoch, position = divmod(ordinal - 1, self._rows)
        return epoch, int(self._permutation(epoch)[position]) if self._shuffle else position

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if self._cached is None or self._cached[0] != epoch:
            generator = np.random.Generator(np.random.PCG64([self._seed, epoch]))
            self._cached = (epoch, generator.permutation(self._rows))
        return self._cached[1]
