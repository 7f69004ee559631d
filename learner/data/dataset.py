"""Data sources, checked when they are opened and read row by row afterwards.

Invariant: a source that was opened has no row without a needed field, so that a run does not stop hours later at row
40,000. Nothing is tokenised here, and no file is held in memory that is larger than `tables.HELD_BYTES`.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Generic, TypeVar

from rollmesh.learner.data.json_lines import JsonLines, check_first_lines
from rollmesh.learner.data.locations import ARROW, PARQUET, data_files, is_hub_id
from rollmesh.learner.data.records import Blocks, RowForm, RowSource, T_co
from rollmesh.learner.data.rows import PromptForm, Row
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.errors import DataError

# Rows that are checked in a moment.
_LOOKED_AT = 1000


T = TypeVar("T")


def open_rows(source: DataSource, form: RowForm[T], *, checked: bool = True) -> RowSource[T]:
    """Opens and checks a source.

    Args:
        source: as configured.
        form: of its rows.
        checked: False: rows that cannot be used are errors when they are read.

    Raises:
        DataError: missing or unreadable file, no rows, or a row without a needed field (row and field named).
    """
    rows = _open(data_files(source), form, checked=checked)
    if len(rows) == 0:
        raise DataError(f"dataset {source.path} has no rows")
    return rows if source.rows is None else first_rows(rows, source.rows)


def open_source(source: DataSource, prompt_key: str = "prompt", *, checked: bool = True) -> RowSource[Row]:
    """Opens and checks a source of prompts.

    Args:
        source: as configured.
        prompt_key: field that holds the prompt, unless the source names its own.
        checked: see `open_rows`.

    Raises:
        DataError: see `open_rows`.
    """
    return open_rows(source, row_form(source, prompt_key), checked=checked)


def check_first_rows(source: DataSource, prompt_key: str = "prompt") -> None:
    """Refuses a source for mistakes in its first rows, in a moment; `open_source` checks all of them.

    Nothing is downloaded: what is not on this machine is left to the learner.

    Raises:
        DataError: as `open_source`.
    """
    if is_hub_id(source.path):
        return
    form, first = row_form(source, prompt_key), data_files(source)[0]
    if first.suffix.lower() in (PARQUET, ARROW):
        # The first row group, or batch, tells the columns; a null further on is found by statistics later.
        _open([first], form)
    else:
        check_first_lines(first, form, _LOOKED_AT)


def row_form(source: DataSource, prompt_key: str) -> PromptForm:
    """The form of a source's prompts."""
    return PromptForm(
        prompt_key=source.prompt_key or prompt_key,
        ground_truth_key=source.ground_truth_key,
        name=source.name,
        label=source.path if is_hub_id(source.path) else Path(source.path).stem,
        template_kwargs=source.chat_template_kwargs,
        sampling=source.sampling,
        confined=is_hub_id(source.path),
    )


def _open(files: Sequence[Path], form: RowForm[T], *, checked: bool = True) -> RowSource[T]:
    suffix = files[0].suffix.lower()
    if suffix in (PARQUET, ARROW):
        # pyarrow starts a thread, and processes are forked from one that has this module.
        from rollmesh.learner.data.tables import ArrowPieces, ParquetPieces, TableRows

        return TableRows((ParquetPieces if suffix == PARQUET else ArrowPieces)(files), form, checked=checked)
    parts = [JsonLines(file, form, checked=checked) for file in files]
    return parts[0] if len(parts) == 1 else JoinedRows(parts)


class JoinedRows(Generic[T_co]):
    """The rows of several sources, one after the other.

    Args:
        parts: the sources; they keep their own order.
    """

    def __init__(self, parts: Sequence[RowSource[T_co]]) -> None:
        self._parts = parts
        self._starts = list(accumulate(map(len, parts), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def blocks(self) -> Blocks | None:
        return None

    @property
    def starts(self) -> Sequence[int]:
        """The number of each part's first row."""
        return self._starts[:-1]

    def rows(self, indices: Sequence[int]) -> list[T_co]:
        places: dict[int, list[int]] = {}
        for position, index in enumerate(indices):
            places.setdefault(bisect.bisect_right(self._starts, index) - 1, []).append(position)
        found: dict[int, T_co] = {}
        for part, positions in places.items():
            start = self._starts[part]
            rows = self._parts[part].rows([indices[position] - start for position in positions])
            found.update(zip(positions, rows, strict=True))
        return [found[position] for position in range(len(indices))]


def first_rows(source: RowSource[T], count: int) -> RowSource[T]:
    """The first rows of a source; all of them, where there are no more."""
    return source if count >= len(source) else _FirstRows(source, count)


class _FirstRows(Generic[T_co]):
    """The first rows of a source."""

    def __init__(self, source: RowSource[T_co], count: int) -> None:
        self._source = source
        self._count = count

    def __len__(self) -> int:
        return self._count

    @property
    def blocks(self) -> Blocks | None:
        blocks = self._source.blocks
        if blocks is None:
            return None
        starts = accumulate(blocks.sizes, initial=0)
        sizes = (min(size, self._count - start) for start, size in zip(starts, blocks.sizes, strict=False))
        return Blocks(tuple(size for size in sizes if size > 0), blocks.window)

    def rows(self, indices: Sequence[int]) -> Sequence[T_co]:
        return self._source.rows(indices)
