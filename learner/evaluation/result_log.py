"""Results of evaluation rounds, in files: `RUN/eval/i<incarnation>-v<version>.jsonl`, one per version.

The first line is the result, every further one a prompt with its responses and their rewards. Invariants: a file that
exists is whole and durable. The newest `FILES_WITH_ROWS` files keep their rows, older ones their first line alone, so
that a long run stays bounded. A version that is evaluated again replaces its file.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rollmesh.mesh.files import write_atomically

log = logging.getLogger(__name__)
FOLDER = "eval"
FILES_WITH_ROWS = 32
# Characters of one response that are stored: its end has the answer.
MAX_TEXT = 4000


class ResultLog:
    """The files of one run; one writer at a time.

    Args:
        run: the run folder.
    """

    def __init__(self, run: Path) -> None:
        self._folder = run / FOLDER

    def write(self, result: dict[str, Any], rows: Iterable[dict[str, Any]]) -> None:
        """Stores a round; a full disk is reported, not raised.

        Args:
            result: with `incarnation` and `version`.
            rows: of its prompts.
        """
        path = self._folder / f"i{result['incarnation']:04d}-v{result['version']:08d}.jsonl"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _replace(path, [result, *rows])
            newest_first = sorted(self._files(), key=lambda file: file.stat().st_mtime_ns, reverse=True)
            for old in newest_first[FILES_WITH_ROWS : FILES_WITH_ROWS + 2]:
                # Each file passes the limit once; one more is trimmed in case a writer was interrupted.
                _keep_first_line(old)
        except OSError as error:
            log.warning("evaluation of version %s not kept: %s", result["version"], error.strerror or error)

    def results(self) -> list[dict[str, Any]]:
        """All results, by incarnation and version."""
        found = []
        for path in self._files():
            with path.open(encoding="utf-8") as file:
                found.append(json.loads(file.readline()))
        return sorted(found, key=lambda result: (result["incarnation"], result["version"]))

    def rows(self, incarnation: int, version: int) -> list[dict[str, Any]]:
        """Prompts of a round as they were stored; none where only its result is left, and for an unknown round."""
        path = self._folder / f"i{incarnation:04d}-v{version:08d}.jsonl"
        if not path.is_file():
            return []
        with path.open(encoding="utf-8") as file:
            # A text's own ends of lines (U+2028 and the like) stand in it unescaped, and end none of the file's.
            return [json.loads(line) for line in islice(file, 1, None)]

    def _files(self) -> Sequence[Path]:
        return list(self._folder.glob("i*-v*.jsonl"))


def shorten_text(text: str) -> str:
    """A text as it is stored."""
    return text if len(text) <= MAX_TEXT else f"... {text[-MAX_TEXT:]}"


def _keep_first_line(path: Path) -> None:
    with path.open(encoding="utf-8") as file:
        first, more = file.readline(), file.readline()
    if more:
        age = path.stat()
        _replace(path, [json.loads(first)])
        os.utime(path, ns=(age.st_atime_ns, age.st_mtime_ns))


def _replace(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    write_atomically(path, text, durable=True)
