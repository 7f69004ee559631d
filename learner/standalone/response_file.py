"""The responses to prompts, one prompt a line, in the order in which they come.

Invariants: a line that was read back is whole and durable. A prompt has one line, however often its group came. So the
file says what is left to do, after whatever end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from rollmesh.mesh.errors import DataError

RESPONSES = "responses.jsonl"
"""Name of the file in the folder of an evaluation."""


class ResponseFile:
    """The file, open for further prompts; one writer at a time.

    Args:
        path: made where it is absent; a last line that was broken off is removed.

    Attributes:
        rows: numbers of the prompts that it holds.

    Raises:
        DataError: it cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            if path.exists():
                _remove_broken_line(path)
            self.rows = {int(record["row"]) for record in read_responses(path)}
            self._file: IO[str] = path.open("a", encoding="utf-8")
        except OSError as error:
            raise DataError(
                f"{path} cannot be used: {error.strerror or error}", hint="choose another folder"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._file.close()

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Stores prompts durably; those that are there already are passed over.

        Raises:
            DataError: the disk refuses.
        """
        try:
            for record in records:
                if record["row"] not in self.rows:
                    self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
                    self.rows.add(record["row"])
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise DataError(f"cannot write {self._path}: {error.strerror or error}", hint="free space there") from error


def read_responses(path: Path) -> Iterator[dict[str, Any]]:
    """The prompts in a file, whole lines alone; none where there is no file.

    Raises:
        DataError: a line is not of such a file.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            try:
                record = json.loads(line)
                int(record["row"])
            except (ValueError, TypeError, KeyError) as error:
                raise DataError(
                    f"{path}, line {number} is damaged: {error}", hint="remove it: its prompt is asked again"
                ) from error
            yield record


def _remove_broken_line(path: Path) -> None:
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - (1 << 16))
            file.seek(start)
            at = file.read(end - start).rfind(b"\n")
            if at >= 0:
                end = start + at + 1
                break
            end = start
        file.truncate(end)
