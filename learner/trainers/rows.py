"""Rows of a data set in the order in which they are trained or evaluated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollmesh.learner.data.examples import Example, ExampleSource
from rollmesh.learner.data.order import DataOrder


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a file, and which of them are used in which order.

    Attributes:
        source: the examples.
        order: of the rows.
    """

    source: ExampleSource
    order: DataOrder

    def of_step(self, step: int, rows: int) -> list[int]:
        """The rows of a step, which counts from 0; fewer in the last step of the last epoch."""
        first, last = step * rows + 1, (step + 1) * rows
        if self.order.last_ordinal is not None:
            last = min(last, self.order.last_ordinal)
        return [self.order.locate(ordinal)[1] for ordinal in range(first, last + 1)]

    def used(self, steps: int, rows: int) -> Sequence[int]:
        """The rows of all steps, each once."""
        if steps * rows >= self.order.rows:
            return range(self.order.rows)
        return sorted({row for step in range(steps) for row in self.of_step(step, rows)})


def rows_of(source: ExampleSource, *, seed: int = 0, shuffle: bool = False, epochs: int | None = None) -> Rows:
    """Rows of a source in the order of a seed; see `DataOrder`."""
    return Rows(source, DataOrder(len(source), seed=seed, shuffle=shuffle, epochs=epochs))


class FirstRows:
    """The first rows of a source.

    Args:
        source: all of them.
        count: how many; None: all.
    """

    def __init__(self, source: ExampleSource, count: int | None) -> None:
        self._source = source
        self._count = len(source) if count is None else min(count, len(source))

    def __len__(self) -> int:
        return self._count

    def examples(self, rows: Sequence[int]) -> list[Example | None]:
        """See `ExampleSource`."""
        return self._source.examples(rows)
