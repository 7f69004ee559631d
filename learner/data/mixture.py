"""The order of several sources: each has an order and epochs of its own, and they take turns in given shares.

Without weights the shares are the numbers of rows: an epoch of all has every row of every source once. With weights a
small source begins its next epoch while a large one is still in its first.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from rollmesh.learner.data.interleaving import Interleaving
from rollmesh.learner.data.order import DataOrder, Order
from rollmesh.learner.data.records import RowSource


class Turns(Protocol):
    """The rule by which sources take turns."""

    def locate(self, ordinal: int) -> tuple[int, int]:
        """(source, number of its ordinals up to this one, which counts)."""
        ...


def order_of(
    sources: Sequence[RowSource[object]],
    *,
    seed: int,
    shuffle: bool,
    epochs: int | None,
    weights: Sequence[float] | None = None,
    turns: Turns | None = None,
) -> Order:
    """The order of a run's data.

    Args:
        sources: at least one, in the order of their rows' numbers.
        seed: of all permutations.
        shuffle: permute the rows of each source in each of its epochs.
        epochs: the run ends once every source has had so many; None for no end.
        weights: of the sources, positive; None: their numbers of rows.
        turns: who has which ordinal, in place of weights; then there is no end.
    """
    if len(sources) == 1:
        return DataOrder(len(sources[0]), seed=seed, shuffle=shuffle, epochs=epochs, blocks=sources[0].blocks)
    orders = [
        DataOrder(len(source), seed=seed, shuffle=shuffle, epochs=None, blocks=source.blocks, stream=number)
        for number, source in enumerate(sources)
    ]
    if turns is not None:
        return MixtureOrder(orders, turns, last_ordinal=None)
    if weights is None:
        shares = Interleaving([order.rows for order in orders], seed=seed)
    else:
        shares = Interleaving.weighted(weights, seed=seed)
    last = None if epochs is None else _end(shares, [epochs * order.rows for order in orders])
    return MixtureOrder(orders, SharedTurns(shares), last_ordinal=last)


class SharedTurns:
    """Turns in shares that stay."""

    def __init__(self, shares: Interleaving) -> None:
        self._shares = shares

    def locate(self, ordinal: int) -> tuple[int, int]:
        source = self._shares.source(ordinal - 1)
        return source, self._shares.count(source, ordinal)


class MixtureOrder:
    """The order of several sources; epochs are those of the row's source.

    Args:
        orders: of each source, without an end.
        turns: which source has which ordinal.
        last_ordinal: of the run; None for no end.
    """

    def __init__(self, orders: Sequence[DataOrder], turns: Turns, *, last_ordinal: int | None) -> None:
        self._orders = orders
        self._turns = turns
        self._last = last_ordinal
        self._starts = list(accumulate((order.rows for order in orders), initial=0))

    @property
    def rows(self) -> int:
        return self._starts[-1]

    @property
    def last_ordinal(self) -> int | None:
        return self._last

    def locate(self, ordinal: int) -> tuple[int, int]:
        if ordinal < 1 or (self._last is not None and ordinal > self._last):
            raise IndexError(f"ordinal {ordinal} is not in 1 .. {self._last}")
        source, number = self._turns.locate(ordinal)
        epoch, row = self._orders[source].locate(number)
        return epoch, self._starts[source] + row


def _end(shares: Interleaving, needed: Sequence[int]) -> int:
    """The least number of places among which each source has as many as it needs."""

    def enough(places: int) -> bool:
        return all(shares.count(source, places) >= number for source, number in enumerate(needed))

    most = 1
    while not enough(most):
        most *= 2
    return bisect.bisect_left(range(most + 1), True, key=enough)
