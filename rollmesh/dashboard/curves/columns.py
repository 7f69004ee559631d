"""Records of a run as columns of numbers, so that a run of 100,000 steps fits into memory.

Invariant: a column has one value per record, NaN where a record lacks it. A value takes 8 bytes. Columns may end early:
NaN at their ends are left out until they are read.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.float64]


class RecordColumns:
    """Grows by records; mappings become one column per entry, `staleness/histogram/2`; of texts the latest is kept."""

    def __init__(self) -> None:
        self._columns: dict[str, array[float]] = {}
        self._texts: dict[str, tuple[int, str]] = {}
        self._rows = 0

    def extended(self, more: Mapping[str, Column]) -> RecordColumns:
        """The same records with further columns, each of shape (records,); for reading, while nothing is appended."""
        found = RecordColumns()
        found._columns = {**self._columns, **{name: array("d", column.tobytes()) for name, column in more.items()}}
        found._texts, found._rows = self._texts, self._rows
        return found

    def __len__(self) -> int:
        return self._rows

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a record; values that are no numbers, mappings of numbers or texts are left out."""
        for name, value in record.items():
            if isinstance(value, str):
                self._texts[name] = (self._rows, value)
            elif isinstance(value, Mapping):
                for key, part in value.items():
                    self._set(f"{name}/{key}", part)
            else:
                self._set(name, value)
        self._rows += 1

    def keep(self, kept: NDArray[np.bool_]) -> None:
        """Removes all records but those marked: shape (records,)."""
        place = np.cumsum(kept) - 1
        self._columns = {name: array("d", self.column(name)[kept].tobytes()) for name in self._columns}
        self._texts = {name: (int(place[row]), text) for name, (row, text) in self._texts.items() if kept[row]}
        self._rows = int(kept.sum())

    def names(self) -> list[str]:
        """Names of the columns, in the order in which they first appeared."""
        return list(self._columns)

    def column(self, name: str) -> Column:
        """A copy of a column: shape (records,); all NaN for an unknown name."""
        found = np.full(self._rows, np.nan)
        values = self._columns.get(name)
        if values is not None:
            found[: len(values)] = values
        return found

    def has(self, name: str) -> bool:
        """True where a record has a number of this name."""
        return name in self._columns and not bool(np.isnan(self.column(name)).all())

    def last(self, name: str) -> float | None:
        """The newest number of a name; None without one."""
        values = self._columns.get(name, ())
        return next((value for value in reversed(values) if not math.isnan(value)), None)

    def total(self, name: str) -> float:
        """The sum of a column."""
        return float(np.nansum(self.column(name)))

    def text(self, name: str) -> str:
        """The newest text of a name; empty without one."""
        return self._texts.get(name, (0, ""))[1]

    def _set(self, name: str, value: object) -> None:
        if not isinstance(value, int | float):
            return
        try:
            number = float(value)
        except OverflowError:
            return
        column = self._columns.get(name)
        if column is None:
            column = self._columns[name] = array("d")
        missing = self._rows - len(column)
        if missing > 0:
            column.extend([math.nan] * missing)
        if missing >= 0:
            column.append(number)
