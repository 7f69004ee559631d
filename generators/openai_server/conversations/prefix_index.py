"""An index of sequences: finds the longest that a new one begins with, in a time that hardly depends on their number.

A *total* is the hash of a prefix: the sum modulo 2**64, over its symbols, of a number for each. That number is mixed of
symbol, place and a secret of this process. The totals of all prefixes come of one cumulative sum, and continue from
that of any of them. Two prefixes with the same total and length are taken for equal: without the secret none can be
forged.
"""

from __future__ import annotations

import secrets
from array import array
from functools import cache
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T")
Totals = npt.NDArray[np.uint64]
_STRIDE = np.uint64(0x9E3779B97F4A7C15)


def totals(symbols: npt.ArrayLike, start: int = 0, total: int = 0) -> Totals:
    """Totals of the beginnings of a sequence.

    Args:
        symbols: [n], integers: from place `start` on.
        start: symbols before them.
        total: of those.

    Returns:
        uint64 [n + 1]: of the first `start`, `start` + 1, ... symbols.
    """
    numbers = np.asarray(symbols, np.uint64)
    places = np.arange(start, start + len(numbers), dtype=np.uint64)
    terms = np.empty(len(numbers) + 1, np.uint64)
    terms[0] = total
    terms[1:] = _mixed(_mixed(numbers ^ _secret()) + places * _STRIDE)
    return np.cumsum(terms, dtype=np.uint64)


@cache
def _secret() -> np.uint64:
    """Made at its first use: processes that were forked with this module loaded have one each."""
    return np.uint64(secrets.randbits(64))


def _mixed(numbers: Totals) -> Totals:
    """Splitmix64's finish: each bit of the result depends on all bits."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


class PrefixIndex(Generic[T]):
    """Items by the sequences that end with them."""

    def __init__(self) -> None:
        self._items: list[T] = []
        self._positions: dict[tuple[int, int], int] = {}
        self._lengths, self._totals = array("q"), array("Q")

    def add(self, length: int, total: int, item: T) -> None:
        """Adds an item under a sequence's length and total; an earlier one with the same is kept."""
        if (length, total) not in self._positions:
            self._positions[length, total] = len(self._items)
            self._items.append(item)
            self._lengths.append(length)
            self._totals.append(total)

    def put(self, length: int, total: int, item: T) -> None:
        """Adds an item; it replaces one with the same sequence."""
        self.add(length, total, item)
        self._items[self._positions[length, total]] = item

    def get(self, length: int, total: int) -> T | None:
        """The item of just that sequence."""
        position = self._positions.get((length, total))
        return None if position is None else self._items[position]

    def longest(self, prefix_totals: Totals, start: int = 0) -> tuple[int, T] | None:
        """The item with the longest sequence that another begins with, and that sequence's length.

        Args:
            prefix_totals: `totals` of the other, from its first `start` symbols on: shorter ones are not looked at.
        """
        if not self._items:
            return None
        lengths, known = np.frombuffer(self._lengths, np.int64), np.frombuffer(self._totals, np.uint64)
        places = np.flatnonzero((lengths >= start) & (lengths < start + len(prefix_totals)))
        places = places[prefix_totals[lengths[places] - start] == known[places]]
        if not len(places):
            return None
        position = int(places[np.argmax(lengths[places])])
        return int(lengths[position]), self._items[position]
