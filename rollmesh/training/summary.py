"""`summary.json` of a training on data: what it has trained, and how its evaluations went.

Invariant: it is made from `metrics.jsonl` and the checkpoints' file about the best one; nothing is estimated.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rollmesh.learner.checkpoint.best import best_checkpoint
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.files import write_atomically
from rollmesh.report.metrics import Record, metric_value, read_metrics
from rollmesh.report.speed import speed_of

_FILE = "summary.json"
LOSS, HELD_OUT = "actor/loss", "eval/loss"
IN_PROGRESS = "in progress"


@dataclass(frozen=True)
class TrainingSummary:
    """A training that has ended, or as far as it went.

    Attributes:
        run, folder: name and folder.
        command: `sft`, `rm` or `dpo`.
        ended: `finished`, `interrupted`, `in progress`, or the error that ended it.
        steps, planned_steps: trained so far, and of the whole training.
        epochs: passes over the data so far.
        loss_first, loss_last: of the first and the last step.
        held_out: every evaluation: its step, and its metrics without `eval/`.
        best: the best evaluation: `checkpoint`, `step`, `metric` and `value`; None without one.
        tokens: trained ones, over all steps.
        training_s: seconds of all steps.
        wall_s: seconds of the last process in all.
        skipped_rows: rows that were left out, over all steps.
        speed: medians over the steps (`report.speed`).
    """

    run: str
    folder: str
    command: str
    ended: str
    steps: int
    planned_steps: int
    epochs: float
    loss_first: float | None
    loss_last: float | None
    held_out: list[dict[str, float]]
    best: dict[str, Any] | None
    tokens: int
    training_s: float
    wall_s: float
    skipped_rows: int
    speed: dict[str, float]

    @property
    def tokens_per_s(self) -> float | None:
        """Trained tokens over the time of steps; None before the first one."""
        return self.tokens / self.training_s if self.training_s else None

    def lines(self) -> Iterator[str]:
        """The summary for a terminal."""
        yield f"{self.command}: {self.ended or 'not known'}"
        yield (
            f"step {self.steps} of {self.planned_steps}, {self.epochs:.2f} epochs, "
            f"loss {_show(self.loss_first)} -> {_show(self.loss_last)}"
        )
        if self.held_out:
            first, last = self.held_out[0], self.held_out[-1]
            yield f"held-out loss {_show(first.get('loss'))} -> {_show(last.get('loss'))} (at step {last['step']:.0f})"
        else:
            yield "no held-out loss: data.eval is not set, or nothing was evaluated yet"
        if self.best is not None:
            yield f"best: step {self.best['step']}, {self.best['metric']} {self.best['value']:.6g}"
        yield f"{self.tokens} tokens trained in {self.training_s:.1f} s, {_show(self.tokens_per_s, '.0f')} tokens/s"
        if self.skipped_rows:
            yield f"{self.skipped_rows} rows were left out: too long, or without a token to train"


def training_records(folder: Path) -> list[Record]:
    """The records of a training's steps, without those that a restart has undone."""
    kept: list[Record] = []
    for record in read_metrics(folder / "metrics.jsonl"):
        while kept and int(kept[-1]["step"]) >= int(record["step"]):
            kept.pop()
        kept.append(record)
    return kept


def evaluations(records: list[Record]) -> list[dict[str, float]]:
    """The evaluations among records: step, and metrics without `eval/`."""
    return [
        {
            "step": int(record["step"]),
            **{name[len("eval/") :]: value for name, value in record.items() if name.startswith("eval/")},
        }
        for record in records
        if HELD_OUT in record
    ]


def build_training_summary(folder: Path, command: str, ended: str, wall_s: float = 0.0) -> TrainingSummary:
    """Combines the contents of a run folder.

    Args:
        folder: of the run.
        command: that trains there.
        ended, wall_s: see `TrainingSummary`.

    Raises:
        DataError: the file about the best checkpoint cannot be read.
    """
    records = training_records(folder)
    last: Mapping[str, Any] = records[-1] if records else {}
    best = best_checkpoint(folder / CHECKPOINTS_NAME)
    return TrainingSummary(
        run=folder.name,
        folder=str(folder),
        command=command,
        ended=ended,
        steps=int(last.get("step", 0)),
        planned_steps=int(last.get("steps", 0)),
        epochs=float(last.get("epoch", 0.0)),
        loss_first=metric_value(records[0], LOSS) if records else None,
        loss_last=metric_value(last, LOSS),
        held_out=evaluations(records),
        best=None
        if best is None
        else {"checkpoint": best.checkpoint, "step": best.version, "metric": best.metric, "value": best.value},
        tokens=int(_total(records, "tokens")),
        training_s=round(_total(records, "timing_s/step"), 3),
        wall_s=round(wall_s, 3),
        skipped_rows=int(_total(records, "skipped_rows")),
        speed=speed_of(records),
    )


def write_training_summary(folder: Path, command: str, ended: str, began_s: float) -> TrainingSummary:
    """Builds the summary of a training that has ended, and writes it into its folder.

    Args:
        folder, command, ended: see `build_training_summary`.
        began_s: `time.monotonic` at the begin of the process.
    """
    summary = build_training_summary(folder, command, ended, time.monotonic() - began_s)
    write_atomically(folder / _FILE, json.dumps(asdict(summary), indent=2) + "\n")
    return summary


def read_training_summary(folder: Path) -> TrainingSummary:
    """The summary in a training's folder.

    Raises:
        DataError: no summary, or one of another program.
    """
    path = folder / _FILE
    try:
        return TrainingSummary(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise DataError(f"no summary in {folder}", hint="it is written when the training ends") from error
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _total(records: list[Record], name: str) -> float:
    return sum(metric_value(record, name) or 0.0 for record in records)


def _show(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)
