"""Reading `metrics.jsonl`: as a whole, and as it grows.

A line is one flat record with `step`, `time` (Unix seconds) and named values: a training step has `critic/score/mean`,
an evaluation has `eval/reward`. A last line that is still being written is left for the next reading.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollmesh.learner.metrics.files import METRICS

Record = Mapping[str, Any]
REWARD = "critic/score/mean"
"""Mean reward of a training step, which distinguishes its record from others."""
_MOST_STEPS = 2**53


def is_training(record: Record) -> bool:
    """True for the record of a training step."""
    return REWARD in record


def is_evaluation(record: Record) -> bool:
    """True for the record of an evaluation round."""
    return "eval/reward" in record


def step_of(record: Record) -> int | None:
    """The step of a record, 0 where it names none; None where it names one that no run reaches."""
    step = record.get("step", 0)
    return step if isinstance(step, int) and 0 <= step <= _MOST_STEPS else None


def metric_value(record: Record, name: str) -> float | None:
    """A metric of a record; None where it is missing or null."""
    value = record.get(name)
    return float(value) if isinstance(value, int | float) else None


class MetricsTail:
    """Follows a metrics file; each `read` gives the records added since the one before.

    Args:
        from_end: leave out the present records of the file.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def read(self) -> list[Record]:
        """New complete records; lines that are no JSON objects are skipped."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            # A run that starts over has its former folder set aside: the next file is another one.
            self._offset = 0
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [record for line in complete.splitlines() if (record := _parse(line)) is not None]


def read_metrics(path: Path) -> list[Record]:
    """All records of a file; empty without a file."""
    return MetricsTail(path).read()


def surviving_records(records: Sequence[Record]) -> list[Record]:
    """The records of the surviving lineage: a step that a resumed learner trained again replaces the discarded one."""
    kept: list[Record] = []
    last = -1
    for record in records:
        if (step := step_of(record)) is None:
            continue
        if is_training(record) and step <= last:
            kept = [old for old in kept if old.get("step", 0) < step]
        if is_training(record):
            last = step
        kept.append(record)
    return kept


def run_records(folder: Path) -> list[Record]:
    """The surviving records of a run folder."""
    return surviving_records(read_metrics(folder / METRICS))


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None
