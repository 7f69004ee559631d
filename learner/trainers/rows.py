"""Rows of a data set in the order in which they are trained or evaluated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rollmesh.learner.data.dataset import first_rows, open_rows
from rollmesh.learner.data.examples import Example, ExampleForm, ExampleSource
from rollmesh.learner.data.order import DataOrder, Order
from rollmesh.learner.data.row_check import MADE_ROWS, RowCheck
from rollmesh.learner.data.training_rows import open_training_rows
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.config.trainers.sections import RowsSection

FormOf = Callable[[DataSource], ExampleForm]
"""Gives the form of a source's rows."""


@dataclass(frozen=True, slots=True, eq=False)
class OrderedRows:
    """Rows of one or several sources, and which of them are used in which order.

    Attributes:
        source: the examples.
        order: of the rows.
        values: further numbers by name, one for each place of the order: entry i is of ordinal i + 1. Examples get
            them besides their own.
    """

    source: ExampleSource
    order: Order
    values: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)

    def of_step(self, step: int, rows: int) -> list[int]:
        """The rows of a step, which counts from 0; fewer in the last step of the last epoch."""
        first, last = step * rows + 1, (step + 1) * rows
        if self.order.last_ordinal is not None:
            last = min(last, self.order.last_ordinal)
        return [self.order.locate(ordinal)[1] for ordinal in range(first, last + 1)]

    def used(self, steps: int, rows: int) -> Sequence[int]:
        """The rows of all steps, each once; where they may be all, all of them."""
        if steps * rows >= self.order.rows:
            return range(self.order.rows)
        return sorted({row for step in range(steps) for row in self.of_step(step, rows)})

    def steps(self, rows: int) -> int | None:
        """The steps of so many rows until the order ends; None where it does not."""
        return None if self.order.last_ordinal is None else -(-self.order.last_ordinal // rows)

    def complete(self, step: int, rows: int, examples: Sequence[Example | None]) -> list[Example | None]:
        """The examples of a step with the values of their places."""
        if not self.values:
            return list(examples)
        return [
            None if example is None else self._with_values(example, step * rows + place)
            for place, example in enumerate(examples)
        ]

    def _with_values(self, example: Example, place: int) -> Example:
        own = {name: (float(values[place]),) * len(example.sequences) for name, values in self.values.items()}
        return replace(example, values={**example.values, **own})


def rows_of(source: ExampleSource, *, seed: int = 0, shuffle: bool = False, epochs: int | None = None) -> OrderedRows:
    """Rows of one source in the order of a seed; see `DataOrder`."""
    return OrderedRows(source, DataOrder(len(source), seed=seed, shuffle=shuffle, epochs=epochs, blocks=source.blocks))


def training_rows(data: RowsSection, form_of: FormOf, *, seed: int, epochs: int | None) -> OrderedRows:
    """The rows of `data.train`.

    Args:
        data: of the configuration.
        form_of: see there.
        seed: of the order.
        epochs: in place of `data.epochs`.

    Raises:
        DataError: see `open_training_rows`.
    """
    return OrderedRows(*open_training_rows(data.model_copy(update={"epochs": epochs}), form_of, seed=seed))


def held_out_rows(data: RowsSection, form_of: FormOf, most: int | None) -> dict[str, OrderedRows]:
    """The rows of `data.eval` by the names of their sources, each once and in their order; see `check_of`.

    Args:
        data: of the configuration.
        form_of: see there.
        most: rows that are used, the first ones; None: all.

    Raises:
        DataError: see `open_rows`.
    """
    found, left = {}, most
    for source in data.eval or ():
        if left == 0:
            break
        rows: ExampleSource = open_rows(source, form_of(source), checked=False)
        rows = rows if left is None else first_rows(rows, left)
        left = None if left is None else left - len(rows)
        found[source.label] = rows_of(rows, epochs=1)
    return found


def check_of(data: RowsSection, form_of: FormOf) -> RowCheck:
    """Begins to look at the rows of `data.train` and `data.eval`.

    Args:
        data: of the configuration; its sources have been opened, so that none is downloaded twice.
        form_of: see there.
    """
    sources = [*data.train, *(data.eval or ())]
    return RowCheck([(source, form_of(source)) for source in sources], made=MADE_ROWS)
