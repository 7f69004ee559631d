"""Data sources: opened, checked row by row, and read in any order afterwards.

Invariant: a source that was checked has no row without a needed field, so that a run does not stop hours later at row
40,000. Nothing is tokenised here, and no file is held in memory that is larger than `tables.HELD_BYTES`.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from pathlib import Path
from typing import Generic, TypeVar

from rollmesh.learner.data.json_lines import JsonLines, check_first_lines
from rollmesh.learner.data.locations import ARROW, PARQUET, data_files, is_hub_id
from rollmesh.learner.data.records import Blocks, FileRows, RowForm, RowSource, T_co
from rollmesh.learner.data.rows import PromptForm, Row
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.errors import DataError

T = TypeVar("T")
# Rows that are checked in a moment.
_LOOKED_AT = 1000


def open_rows(source: DataSource, form: RowForm[T], *, checked: bool = True) -> FileRows[T]:
    """Opens and checks a source.

    Args:
        source: as configured.
        form: of its rows.
        checked: every row is looked at now; otherwise rows that cannot be used are errors when they are read.

    Raises:
        DataError: missing or unreadable file, no rows, or a row without a needed field (row and field named).
    """
    rows = _open(data_files(source), form)
    if len(rows) == 0:
        raise DataError(f"dataset {source.path} has no rows")
    if source.rows is not None and source.rows < len(rows):
        rows = _FirstFileRows(rows, source.rows)
    for _ in rows.check() if checked else ():
        pass
    return rows


def open_source(source: DataSource, prompt_key: str = "prompt", *, checked: bool = True) -> FileRows[Row]:
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
        rows = _open([first], form)
        rows.rows(range(min(_LOOKED_AT, len(rows))))
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


def _open(files: Sequence[Path], form: RowForm[T]) -> FileRows[T]:
    suffix = files[0].suffix.lower()
    if suffix in (PARQUET, ARROW):
        # pyarrow starts a thread, and processes are forked from one that has this module.
        from rollmesh.learner.data.tables import ArrowPieces, ParquetPieces, TableRows

        return TableRows((ParquetPieces if suffix == PARQUET else ArrowPieces)(files), form)
    parts = [JsonLines(file, form) for file in files]
    return parts[0] if len(parts) == 1 else _JoinedFiles(parts)


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


class _JoinedFiles(JoinedRows[T_co]):
    """The rows of several files."""

    def __init__(self, parts: Sequence[FileRows[T_co]]) -> None:
        super().__init__(parts)
        self._files = parts

    def check(self) -> Iterator[int]:
        """See `records.FileRows`."""
        for start, part in zip(self.starts, self._files, strict=True):
            for looked_at in part.check():
                yield start + looked_at


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


class _FirstFileRows(_FirstRows[T_co]):
    """The first rows of files."""

    def __init__(self, source: FileRows[T_co], count: int) -> None:
        super().__init__(source, count)
        self._files = source

    def check(self) -> Iterator[int]:
        """See `records.FileRows`."""
        yield from islice(self._files.check(), self._count)
