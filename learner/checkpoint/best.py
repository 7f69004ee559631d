"""The best checkpoint: `checkpoints/best.json`, one file that is replaced whole.

It names the best checkpoint with its measurement, the candidates and the incarnation that may write the file.
Candidates are checkpoints of versions under evaluation. Invariants: checkpoints that it names are never
pruned. A better value takes the place of the best one, an equal one does not: the earliest of ties stays. Every change
is made under a lock, and only the newest incarnation that has claimed the file may make one: a superseded learner
changes nothing. A checkpoint becomes the best only while it exists, and only with a value that is a finite number.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from rollmesh.mesh.errors import DataError, FencedError
from rollmesh.mesh.files import write_atomically

FILE = "best.json"
LOCK_S = 30.0
"""Longest wait for another learner, which holds the lock for the time of one small write."""
_LOCK = ".best.lock"
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Best:
    """The best checkpoint.

    Attributes:
        checkpoint: name of its folder.
        incarnation, version: of the weights that it holds.
        metric, direction: the compared metric, and whether `max` or `min` is better.
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

    def beats(self, other: Best | None) -> bool:
        """Whether it is better than the best so far; values of another metric, or measured otherwise, give way."""
        if not math.isfinite(self.value):
            return False
        if other is None or not math.isfinite(other.value) or self._measure != other._measure:
            return True
        return self.value > other.value if self.direction == "max" else self.value < other.value

    @property
    def _measure(self) -> tuple[str, str, str]:
        return self.metric, self.direction, self.measured_by


@dataclass(frozen=True, slots=True)
class _Record:
    writer: int = 0
    best: Best | None = None
    candidates: tuple[str, ...] = ()


_RECORD = TypeAdapter(_Record)


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
            DataError: the file cannot be read, or another learner keeps its lock.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        return self._change(lambda record: dataclasses.replace(record, writer=self._incarnation, candidates=())).best

    def keep_candidate(self, checkpoint: str) -> None:
        """Keeps a checkpoint until it is evaluated.

        Raises:
            FencedError: another learner has taken over.
        """
        self._change(lambda record: dataclasses.replace(record, candidates=(*record.candidates, checkpoint)))

    def release(self, checkpoint: str) -> None:
        """Drops a candidate that is not evaluated after all.

        Raises:
            FencedError: another learner has taken over.
        """
        self._change(lambda record: _without(record, checkpoint))

    def record_value(self, found: Best) -> bool:
        """Records the value of a candidate; returns whether it is the best one now.

        Raises:
            FencedError: another learner has taken over.
        """

        def decide(record: _Record) -> _Record:
            record = _without(record, found.checkpoint)
            there = (self._root / found.checkpoint).is_dir()
            return dataclasses.replace(record, best=found) if there and found.beats(record.best) else record

        return self._change(decide).best == found

    def _change(self, change: Callable[[_Record], _Record]) -> _Record:
        with _locked(self._root):
            before = _read(self._root)
            if before.writer > self._incarnation:
                raise FencedError(f"incarnation {before.writer} has taken over, this learner is {self._incarnation}")
            record = change(before)
            if record != before:
                _write(self._root, record)
            return record


def best_checkpoint(root: Path) -> Best | None:
    """The best checkpoint of a run.

    Args:
        root: folder of the checkpoints.

    Raises:
        DataError: the file cannot be read.
    """
    return _read(root).best


def parse_best(content: bytes) -> Best | None:
    """The best checkpoint that a copy of the file names; None also where it cannot be read."""
    try:
        return _RECORD.validate_json(content).best
    except ValueError:
        return None


def restore_best(root: Path, best: Best) -> None:
    """Writes the file for a run that has come back; the next learner claims it.

    Args:
        root: folder of the checkpoints, which has this one.
        best: named by a copy of the file.
    """
    _write(root, _Record(best=best))


def protected_names(root: Path) -> frozenset[str]:
    """Names of checkpoints that must stay.

    Raises:
        DataError: the file cannot be read.
    """
    record = _read(root)
    best = () if record.best is None else (record.best.checkpoint,)
    return frozenset((*best, *record.candidates))


def _without(record: _Record, checkpoint: str) -> _Record:
    return dataclasses.replace(record, candidates=tuple(name for name in record.candidates if name != checkpoint))


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    with (root / _LOCK).open("a") as file:
        end = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise DataError(
                        f"another learner has held {root / _LOCK} for {LOCK_S:.0f} s; it may be stopped",
                        hint="end that process, then start this learner again",
                    ) from None
                time.sleep(_LOOK_S)
        yield


def _read(root: Path) -> _Record:
    try:
        return _RECORD.validate_json((root / FILE).read_bytes())
    except FileNotFoundError:
        return _Record()
    except (OSError, ValueError) as error:
        raise DataError(
            f"{root / FILE} cannot be read: {error}",
            hint="remove it: the next evaluation writes it again, and the checkpoint that it named is no longer kept",
        ) from error


def _write(root: Path, record: _Record) -> None:
    write_atomically(root / FILE, json.dumps(asdict(record), indent=2), durable=True)
