"""Dataset files, checked when they are opened and read row by row afterwards.

Invariant: a dataset that was opened has no row without a needed field, so that a run does not stop hours later at row
40,000. Nothing is tokenised here and a JSONL file is not held in memory.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from rollmesh.learner.data.rows import Row, RowSource, parse_row
from rollmesh.mesh.errors import DataError

_JSON_LINES = (".jsonl", ".json", ".ndjson")
# Rows that are checked in a moment.
_LOOKED_AT = 1000


def open_dataset(path: Path, prompt_key: str = "prompt") -> RowSource:
    """Opens and checks a dataset.

    Args:
        path: a `.parquet`, `.jsonl` or `.json` (one object per line) file.
        prompt_key: field that holds the prompt.

    Raises:
        DataError: missing or unreadable file, no rows, or a row without a needed field (row and field named).
    """
    if not path.is_file():
        raise DataError(f"dataset {path} does not exist", hint="set data.train / data.eval to a Parquet or JSONL file")
    suffix = path.suffix.lower()
    source: RowSource
    if suffix == ".parquet":
        from rollmesh.learner.data.parquet import ParquetRows

        source = ParquetRows(path, prompt_key)
    elif suffix in _JSON_LINES:
        source = JsonlRows(path, prompt_key)
    else:
        raise DataError(f"dataset {path} has an unknown form", hint="use a .parquet or .jsonl file")
    if len(source) == 0:
        raise DataError(f"dataset {path} has no rows")
    return source


def check_first_rows(path: Path, prompt_key: str = "prompt") -> None:
    """Refuses a dataset for mistakes in its first rows, in a moment; `open_dataset` checks all of them.

    Raises:
        DataError: as `open_dataset`.
    """
    if path.suffix.lower() not in _JSON_LINES or not path.is_file():
        # A Parquet file stores its columns separately, so that checking all rows takes no longer.
        open_dataset(path, prompt_key)
        return
    with path.open("rb") as file:
        lines = (line for line in file if line.strip())
        found = [_json_row(path, index, line, prompt_key) for index, line in enumerate(islice(lines, _LOOKED_AT))]
    if not found:
        raise DataError(f"dataset {path} has no rows")


class JsonlRows:
    """One JSON object per line. Holds the offset of every line, reads the lines when they are asked for."""

    def __init__(self, path: Path, prompt_key: str) -> None:
        self._path = path
        self._prompt_key = prompt_key
        self._offsets = array("q")
        position = 0
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    self._parse(len(self._offsets), line)
                    self._offsets.append(position)
                position += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def rows(self, indices: Sequence[int]) -> list[Row]:
        found = []
        with self._path.open("rb") as file:
            for index in indices:
                file.seek(self._offsets[index])
                found.append(self._parse(index, file.readline()))
        return found

    def _parse(self, index: int, line: bytes) -> Row:
        return _json_row(self._path, index, line, self._prompt_key)


def _json_row(path: Path, index: int, line: bytes, prompt_key: str) -> Row:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}, row {index}: not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f"{path}, row {index}: expected an object, got {type(record).__name__}")
    # Only an escape can stand for half a character; checking all text would cost as much as reading it.
    if b"\\ud" in line.lower():
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{path}, row {index}: holds half a surrogate pair, {error.object[error.start]!a}, which is no text",
                hint="write the data again, with errors='replace'",
            ) from error
    return parse_row(path, index, record, prompt_key)
