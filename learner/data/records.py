"""Rows of data, whatever they are used for: where they come from, and what is made of each of their records.

There is one reader of files (`learner.data.dataset.open_rows`). The form that it is given makes prompts of a run, or
examples of a trainer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

Record = Mapping[str, Any]
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Successive rows that are read together, because they lie in one compressed part of a file.

    Attributes:
        sizes: rows of each block, in the order of the rows; their sum is the number of rows.
        window: blocks that memory holds at a time.
    """

    sizes: tuple[int, ...]
    window: int


class RowSource(Protocol[T_co]):
    """Random access to rows."""

    def __len__(self) -> int: ...

    @property
    def blocks(self) -> Blocks | None:
        """Rows that are read together; None where every row can be read alone."""
        ...

    def rows(self, indices: Sequence[int]) -> Sequence[T_co]:
        """The rows at `indices`, in that order.

        Raises:
            DataError: one cannot be read, or has not the form that is needed; names it.
        """
        ...


class FileRows(RowSource[T_co], Protocol[T_co]):
    """Rows of files."""

    def check(self) -> Iterator[int]:
        """Looks at every row, in order; what was read stays as it is.

        Yields:
            The rows that have been looked at.

        Raises:
            DataError: a row has not the form that is needed; names row and field.
        """
        ...


class RowForm(Protocol[T_co]):
    """The form of a source's records, and what is made of one.

    `names` are the fields of a file's first row, which decide between forms.
    """

    def columns(self, names: Collection[str]) -> list[str]:
        """Fields that are read where a file has columns."""
        ...

    def check(self, path: Path, index: int, record: Record, names: Collection[str]) -> None:
        """Looks at a record, before anything is made of one.

        Args:
            path: its file.
            index: its number there.
            record: its fields.
            names: see above.

        Raises:
            DataError: it has not the form; names row and field.
        """
        ...

    def parse(self, path: Path, index: int, record: Record, names: Collection[str]) -> T_co:
        """Makes a row of a record; arguments and errors as those of `check`."""
        ...
