"""JSONL files: the offset of every row is held, and rows are read when they are asked for."""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Generic

from rollmesh.learner.data.records import Blocks, RowForm, T_co
from rollmesh.mesh.errors import DataError


class JsonLines(Generic[T_co]):
    """Rows of one file with one JSON object per line.

    Args:
        path: the file.
        form: of its rows.
    """

    def __init__(self, path: Path, form: RowForm[T_co]) -> None:
        self._path = path
        self._form = form
        self._offsets = array("q")
        self._names: Collection[str] = ()
        for index, (offset, line) in enumerate(_lines(path)):
            self._offsets.append(offset)
            if not self._names:
                # A row that is no object is an error where rows are checked, or read.
                with suppress(DataError):
                    self._names = tuple(_record(path, index, line))

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def blocks(self) -> Blocks | None:
        return None

    def rows(self, indices: Sequence[int]) -> list[T_co]:
        found = []
        with self._path.open("rb") as file:
            for index in indices:
                file.seek(self._offsets[index])
                record = _record(self._path, index, file.readline())
                found.append(self._form.parse(self._path, index, record, self._names))
        return found

    def check(self) -> Iterator[int]:
        """See `records.FileRows`."""
        for index, (_, line) in enumerate(_lines(self._path)):
            self._form.check(self._path, index, _record(self._path, index, line), self._names)
            yield index + 1


def check_first_lines(path: Path, form: RowForm[object], count: int) -> None:
    """Checks the first rows of a file.

    Raises:
        DataError: a row is no object, or has not the form that is needed.
    """
    names: Collection[str] = ()
    for index, (_, line) in enumerate(islice(_lines(path), count)):
        record = _record(path, index, line)
        names = names or tuple(record)
        form.check(path, index, record, names)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, one after the other.

    Raises:
        DataError: a row is no object (row named).
    """
    for index, (_, line) in enumerate(_lines(path)):
        yield _record(path, index, line)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of each line that is not blank."""
    position = 0
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield position, line
            position += len(line)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; a name that comes twice would lose its first value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has the name {next(name for name in names if names.count(name) > 1)!r} twice")
    return found


def _record(path: Path, index: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line, object_pairs_hook=_once)
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
    return record
