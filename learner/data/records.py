"""Rows of any form from a Parquet or JSONL file: records that the caller gives a meaning.

A JSONL file is read where it lies, and only the offsets of its rows are held. A Parquet file is held as Arrow columns.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rollmesh.mesh.errors import DataError

Record = Mapping[str, Any]
_JSON_LINES = (".jsonl", ".json", ".ndjson")


class RecordSource(Protocol):
    """Random access to the records of a file."""

    def __len__(self) -> int: ...

    def records(self, rows: Sequence[int]) -> list[Record]:
        """The records of some rows, in that order.

        Raises:
            DataError: one cannot be read; names it.
        """
        ...


def open_records(path: Path, key: str) -> RecordSource:
    """Opens a file of records.

    Args:
        path: a `.parquet`, `.jsonl` or `.json` file (one object per line).
        key: of the configuration that names it, for errors.

    Raises:
        DataError: missing or unreadable file, unknown form, or no rows.
    """
    if not path.is_file():
        raise DataError(f"{key}: {path} does not exist", hint=f"set {key} to a Parquet or JSONL file")
    source: RecordSource
    if path.suffix.lower() == ".parquet":
        source = ParquetRecords(path)
    elif path.suffix.lower() in _JSON_LINES:
        source = JsonlRecords(path)
    else:
        raise DataError(f"{key}: {path} has an unknown form", hint="use a .parquet or .jsonl file")
    if not len(source):
        raise DataError(f"{key}: {path} has no rows")
    return source


class JsonlRecords:
    """One JSON object per line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets = array("q")
        position = 0
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    self._offsets.append(position)
                position += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def records(self, rows: Sequence[int]) -> list[Record]:
        """See `RecordSource`."""
        found: list[Record] = []
        with self._path.open("rb") as file:
            for row in rows:
                file.seek(self._offsets[row])
                try:
                    record = json.loads(file.readline())
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{self._path}, row {row}: not valid JSON: {error}") from error
                if not isinstance(record, dict):
                    raise DataError(f"{self._path}, row {row}: expected an object, got {type(record).__name__}")
                found.append(record)
        return found


class ParquetRecords:
    """The rows of one Parquet file.

    Raises:
        DataError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            self._table = pq.read_table(path)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"cannot read {path}: {error}", hint="is it a Parquet file?") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def records(self, rows: Sequence[int]) -> list[Record]:
        """See `RecordSource`."""
        found: list[Record] = self._table.take(list(rows)).to_pylist()
        return found
