"""All rows of a source for a check, which names those that cannot be used in place of ending at the first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from rollmesh.learner.data.records import RowSource
from rollmesh.mesh.errors import DataError

_CHUNK = 256
T = TypeVar("T")


def read_all(rows: RowSource[T]) -> Iterator[tuple[int, T | DataError]]:
    """Every row with its number, in order.

    Args:
        rows: opened without a check.

    Yields:
        The row, or the error that names it.
    """
    for start in range(0, len(rows), _CHUNK):
        chosen = range(start, min(start + _CHUNK, len(rows)))
        try:
            yield from zip(chosen, rows.rows(chosen), strict=True)
        except DataError:
            for index in chosen:
                yield index, _read(rows, index)


def _read(rows: RowSource[T], index: int) -> T | DataError:
    try:
        return rows.rows([index])[0]
    except DataError as error:
        return error
