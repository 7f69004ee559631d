"""Which checkpoint is the best one: `checkpoints/best.json`, one file that is replaced whole.

It names the best checkpoint with what was measured there, the candidates (checkpoints of versions whose evaluation is
under way) and the incarnation that may write it. Invariants: what it names is never pruned; a better value takes the
place of the best one, an equal one does not, so that of ties the earliest stays; every change is made under a lock and
refused to all but the newest incarnation that has claimed the file, so that a learner that was superseded changes
nothing; a checkpoint becomes the best only while it is there.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from rollmesh.mesh.errors import DataError, FencedError
from rollmesh.mesh.runtime.files import fsync_path

FILE = "best.json"
_LOCK = ".best.lock"


@dataclass(frozen=True, slots=True)
class Best:
    """The best checkpoint.

    Attributes:
        checkpoint: name of its folder.
        incarnation, version: whose weights it holds.
        metric, direction: what was compared, and whether `max` or `min` is better.
        value: of the metric.
        measured_by: values under another name cannot be compared (`learner.evaluation.measurement_identity`).
    """

    checkpoint: str
    incarnation: int
    version: int
    metric: str
    direction: Literal["max", "min"]
    value: float
    measured_by: str

    def yields_to(self, other: Best) -> bool:
        """Whether another one is better; values of another metric, or measured otherwise, give way."""
        mine, others = (
            (self.metric, self.direction, self.measured_by),
            (other.metric, other.direction, other.measured_by),
        )
        if mine != others:
            return True
        return other.value > self.value if self.direction == "max" else other.value < self.value


@dataclass(frozen=True, slots=True)
class _Book:
    writer: int = 0
    best: Best | None = None
    candidates: tuple[str, ...] = ()


_BOOK = TypeAdapter(_Book)


class BestCheckpoint:
    """The file of one run, for one learner.

    Args:
        root: folder of the checkpoints.
        incarnation: of this learner.
    """

    def __init__(self, root: Path, incarnation: int) -> None:
        self._root = root
        self._incarnation = incarnation

    def claim(self) -> Best | None:
        """Takes the file over; candidates of the learner before are dropped. Returns the best so far.

        Raises:
            FencedError: a later incarnation has it.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        return self._change(lambda book: dataclasses.replace(book, writer=self._incarnation, candidates=())).best

    def keep_candidate(self, checkpoint: str) -> None:
        """Keeps a checkpoint until it is evaluated.

        Raises:
            FencedError: another learner has taken over.
        """
        self._change(lambda book: dataclasses.replace(book, candidates=(*book.candidates, checkpoint)))

    def release(self, checkpoint: str) -> None:
        """Drops a candidate that is not evaluated after all.

        Raises:
            FencedError: another learner has taken over.
        """
        self._change(lambda book: _without(book, checkpoint))

    def record_value(self, found: Best) -> bool:
        """Records the value of a candidate; returns whether it is the best one now.

        Raises:
            FencedError: another learner has taken over.
        """

        def decide(book: _Book) -> _Book:
            book = _without(book, found.checkpoint)
            better = book.best is None or book.best.yields_to(found)
            there = (self._root / found.checkpoint).is_dir()
            return dataclasses.replace(book, best=found) if better and there else book

        return self._change(decide).best == found

    def _change(self, change: Callable[[_Book], _Book]) -> _Book:
        with _locked(self._root):
            before = _read(self._root)
            if before.writer > self._incarnation:
                raise FencedError(
                    f"incarnation {before.writer} has taken over, this learner is {self._incarnation}",
                    hint="it continues the run; this one ends",
                )
            book = change(before)
            if book != before:
                _write(self._root, book)
            return book


def best_checkpoint(root: Path) -> Best | None:
    """The best checkpoint of a run.

    Args:
        root: folder of the checkpoints.

    Raises:
        DataError: the file cannot be read.
    """
    return _read(root).best


def protected_names(root: Path) -> frozenset[str]:
    """Names of checkpoints that must stay.

    Raises:
        DataError: the file cannot be read.
    """
    book = _read(root)
    best = () if book.best is None else (book.best.checkpoint,)
    return frozenset((*best, *book.candidates))


def _without(book: _Book, checkpoint: str) -> _Book:
    return dataclasses.replace(book, candidates=tuple(name for name in book.candidates if name != checkpoint))


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    with (root / _LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _read(root: Path) -> _Book:
    try:
        return _BOOK.validate_json((root / FILE).read_bytes())
    except FileNotFoundError:
        return _Book()
    except (OSError, ValueError) as error:
        raise DataError(
            f"{root / FILE} cannot be read: {error}",
            hint="remove it: the next evaluation writes it again, and the checkpoint that it named is kept no longer",
        ) from error


def _write(root: Path, book: _Book) -> None:
    scratch = root / f".{FILE}.tmp"
    with scratch.open("w", encoding="utf-8") as file:
        json.dump(asdict(book), file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(root / FILE)
    fsync_path(root)
