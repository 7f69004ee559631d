"""Rows of Parquet and Arrow files, piece by piece: a row group, or a record batch.

Invariant: memory holds a bounded number of pieces. Arrow files are mapped into memory, and cost none. Parquet files of
up to `HELD_BYTES` are held whole; of larger ones the last few row groups that were used.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Generic, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from rollmesh.learner.data.records import Blocks, RowForm, T_co
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.rows.arrow_rows import rows_of

# The order of a large file's rows depends on it: another value is another order.
HELD_BYTES = 256 << 20
# Rows that are objects of Python at a time.
_LOOKED_AT = 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows that are read together.

    Attributes:
        path: their file.
        number: of the piece in its file.
        first: number of its first row in its file.
        rows: how many.
    """

    path: Path
    number: int
    first: int
    rows: int


class Pieces(Protocol):
    """The pieces of one or several files."""

    @property
    def pieces(self) -> Sequence[Piece]: ...

    @property
    def names(self) -> Sequence[str]:
        """Columns of the files."""
        ...

    @property
    def held(self) -> int | None:
        """Pieces that memory may hold; None: all of them."""
        ...

    def select(self, columns: Sequence[str]) -> None:
        """Reads these columns alone from now on."""
        ...

    def read(self, piece: int) -> pa.Table: ...


class ParquetPieces:
    """The row groups of Parquet files with the same columns.

    Raises:
        DataError: a file cannot be read, or has other columns than the first one.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.names: Sequence[str] = ()
        self.held: int | None = None
        self.pieces: list[Piece] = []
        self._metadata: dict[Path, pq.FileMetaData] = {}
        self._columns: Sequence[str] | None = None
        for path in files:
            with _reading(path):
                metadata = pq.read_metadata(path)
            names = metadata.schema.to_arrow_schema().names
            if self._metadata and set(names) != set(self.names):
                raise DataError(
                    f"{path} has other columns than {files[0]}: {', '.join(sorted(set(names) ^ set(self.names)))}",
                    hint="name them as sources of their own",
                )
            self.names = self.names or names
            self._metadata[path] = metadata
            first = 0
            for number in range(metadata.num_row_groups):
                rows = metadata.row_group(number).num_rows
                self.pieces.append(Piece(path, number, first, rows))
                first += rows

    def select(self, columns: Sequence[str]) -> None:
        self._columns = columns
        sizes = [self._bytes(piece) for piece in self.pieces]
        if sum(sizes) > HELD_BYTES:
            self.held = max(1, HELD_BYTES // max(sizes))

    def read(self, piece: int) -> pa.Table:
        chosen = self.pieces[piece]
        with _reading(chosen.path), pq.ParquetFile(chosen.path, metadata=self._metadata[chosen.path]) as file:
            return file.read_row_group(chosen.number, columns=self._columns)

    def _leaves(self, piece: Piece, field: str) -> Iterator[pq.ColumnChunkMetaData]:
        group = self._metadata[piece.path].row_group(piece.number)
        for index in range(group.num_columns):
            leaf = group.column(index)
            if f"{leaf.path_in_schema}.".startswith(f"{field}."):
                yield leaf

    def _bytes(self, piece: Piece) -> int:
        """Size of the selected columns in memory, about."""
        return sum(
            leaf.total_uncompressed_size for column in self._columns or () for leaf in self._leaves(piece, column)
        )


class ArrowPieces:
    """The record batches of Arrow files in the stream format, as `datasets` saves them.

    Raises:
        DataError: a file cannot be read.
    """

    held = None

    def __init__(self, files: Sequence[Path]) -> None:
        self.pieces: list[Piece] = []
        self._batches: list[pa.RecordBatch] = []
        self._columns: list[str] = []
        for path in files:
            first = 0
            with _reading(path):
                # The mapping lives as long as the batches that point into it.
                for number, batch in enumerate(pa.ipc.open_stream(pa.memory_map(str(path)))):
                    self.pieces.append(Piece(path, number, first, batch.num_rows))
                    self._batches.append(batch)
                    first += batch.num_rows
        self.names = self._batches[0].schema.names if self._batches else []

    def select(self, columns: Sequence[str]) -> None:
        self._columns = list(columns)

    def read(self, piece: int) -> pa.Table:
        return pa.Table.from_batches([self._batches[piece]]).select(self._columns)


class TableRows(Generic[T_co]):
    """Rows of all pieces.

    Args:
        pieces: of the files.
        form: of the rows.
    """

    def __init__(self, pieces: Pieces, form: RowForm[T_co]) -> None:
        self._pieces = pieces
        self._form = form
        self._names = tuple(pieces.names)
        self._starts = list(accumulate((piece.rows for piece in pieces.pieces), initial=0))
        self._held: OrderedDict[int, pa.Table] = OrderedDict()
        pieces.select(form.columns(self._names))

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def blocks(self) -> Blocks | None:
        if self._pieces.held is None:
            return None
        return Blocks(tuple(end - start for start, end in pairwise(self._starts)), self._pieces.held)

    def rows(self, indices: Sequence[int]) -> list[T_co]:
        places: dict[int, list[int]] = {}
        for position, index in enumerate(indices):
            places.setdefault(bisect.bisect_right(self._starts, index) - 1, []).append(position)
        found: dict[int, T_co] = {}
        for number, positions in places.items():
            piece, start = self._pieces.pieces[number], self._starts[number]
            offsets = [indices[position] - start for position in positions]
            records = _taken(self._table(number), offsets)
            for position, offset, record in zip(positions, offsets, records, strict=True):
                found[position] = self._form.parse(piece.path, piece.first + offset, record, self._names)
        return [found[position] for position in range(len(indices))]

    def check(self) -> Iterator[int]:
        """See `records.FileRows`; holds no piece but the current one."""
        for number, piece in enumerate(self._pieces.pieces):
            table = self._pieces.read(number)
            for start in range(0, piece.rows, _LOOKED_AT):
                offsets = range(start, min(start + _LOOKED_AT, piece.rows))
                for offset, record in zip(offsets, _taken(table, offsets), strict=True):
                    self._form.check(piece.path, piece.first + offset, record, self._names)
                    yield self._starts[number] + offset + 1

    def _table(self, piece: int) -> pa.Table:
        if piece in self._held:
            self._held.move_to_end(piece)
            return self._held[piece]
        # Room is made before, so that memory never holds one more.
        while self._pieces.held is not None and len(self._held) >= self._pieces.held:
            self._held.popitem(last=False)
        self._held[piece] = self._pieces.read(piece)
        return self._held[piece]


def _taken(table: pa.Table, offsets: Sequence[int]) -> list[dict[str, Any]]:
    """Some rows of a piece."""
    return rows_of(table.take(pa.array(offsets, type=pa.int64())))


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Names the file in errors of pyarrow."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot read {path}: {error}", hint="is it a whole file of that form?") from error
