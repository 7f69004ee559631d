"""Data sources, checked when they are opened and read row by row afterwards.

Invariant: a source that was opened has no row without a needed field, so that a run does not stop hours later at row
40,000. Nothing is tokenised here, and no file is held in memory that is larger than `tables.HELD_BYTES`.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from rollmesh.learner.data.json_lines import JsonLines, check_first_lines
from rollmesh.learner.data.locations import ARROW, PARQUET, data_files, is_hub_id
from rollmesh.learner.data.rows import Blocks, Row, RowForm, RowSource
from rollmesh.learner.data.tables import ArrowPieces, ParquetPieces, TableRows
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.errors import DataError

# Rows that are checked in a moment.
_LOOKED_AT = 1000


def open_source(source: DataSource, prompt_key: str = "prompt") -> RowSource:
    """Opens and checks a source.

    Args:
        source: as configured.
        prompt_key: field that holds the prompt, unless the source names its own.

    Raises:
        DataError: missing or unreadable file, no rows, or a row without a needed field (row and field named).
    """
    rows = _open(data_files(source), row_form(source, prompt_key))
    if len(rows) == 0:
        raise DataError(f"dataset {source.path} has no rows")
    return rows if source.rows is None or source.rows >= len(rows) else FirstRows(rows, source.rows)


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


def row_form(source: DataSource, prompt_key: str) -> RowForm:
    """The names of a source's fields."""
    return RowForm(
        prompt_key=source.prompt_key or prompt_key,
        ground_truth_key=source.ground_truth_key,
        name=source.name,
        label=source.path if is_hub_id(source.path) else Path(source.path).stem,
        template_kwargs=source.chat_template_kwargs,
        confined=is_hub_id(source.path),
    )


def _open(files: Sequence[Path], form: RowForm) -> RowSource:
    suffix = files[0].suffix.lower()
    if suffix == PARQUET:
        return TableRows(ParquetPieces(files), form)
    if suffix == ARROW:
        return TableRows(ArrowPieces(files), form)
    parts = [JsonLines(file, form) for file in files]
    return parts[0] if len(parts) == 1 else JoinedRows(parts)


class JoinedRows:
    """The rows of several sources, one after the other.

    Args:
        parts: the sources; they keep their own order.
    """

    def __init__(self, parts: Sequence[RowSource]) -> None:
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

    def rows(self, indices: Sequence[int]) -> list[Row]:
        places: dict[int, list[int]] = {}
        for position, index in enumerate(indices):
            places.setdefault(bisect.bisect_right(self._starts, index) - 1, []).append(position)
        found: dict[int, Row] = {}
        for part, positions in places.items():
            start = self._starts[part]
            rows = self._parts[part].rows([indices[position] - start for position in positions])
            for position, row in zip(positions, rows, strict=True):
                found[position] = replace(row, index=indices[position])
        return [found[position] for position in range(len(indices))]


class FirstRows:
    """The first rows of a source."""

    def __init__(self, source: RowSource, count: int) -> None:
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

    def rows(self, indices: Sequence[int]) -> list[Row]:
        return self._source.rows(indices)
