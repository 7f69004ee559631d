"""`summary.json` of a training on data: what it has trained, and how its evaluations went.

Invariant: it is made from `metrics.jsonl` and the checkpoints' file about the best one; nothing is estimated.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmesh.learner.checkpoint.best import best_checkpoint
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME
from rollmesh.learner.metrics.files import METRICS
from rollmesh.report.metrics import Record, metric_value, read_metrics
from rollmesh.report.speed import speed_of
from rollmesh.report.summary import checkpoint_folders
from rollmesh.report.summary_file import SummaryValues, keep_summary, kept_summary

LOSS, HELD_OUT = "actor/loss", "eval/loss"
_ACCURACY = "rewards/accuracies"
IN_PROGRESS = "in progress"


@dataclass(frozen=True)
class TrainingSummary(SummaryValues):
    """A training that has ended, or as far as it went.

    Attributes:
        run, folder: name and folder.
        command: `sft`, `rm` or `dpo`.
        ended: `finished`, `interrupted`, `in progress`, or the error that ended it.
        steps, planned_steps: trained so far, and of the whole training.
        epochs: passes over the data so far.
        loss_first, loss_last: of the first and the last step.
        accuracy_first, accuracy_last: the same of the share of pairs whose chosen response has the greater reward; None
            without pairs.
        checkpoint: folder of the newest checkpoint; None without one.
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
    accuracy_first: float | None = None
    accuracy_last: float | None = None
    checkpoint: str | None = None

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
            f"{_accuracy(self.accuracy_first, self.accuracy_last)}"
        )
        if self.held_out:
            first, last = self.held_out[0], self.held_out[-1]
            accuracy = _accuracy(first.get(_ACCURACY), last.get(_ACCURACY))
            losses = f"{_show(first.get('loss'))} -> {_show(last.get('loss'))}"
            yield f"held-out loss {losses}{accuracy} (at step {last['step']:.0f})"
        else:
            yield "no held-out loss: data.eval is not set, or nothing was evaluated yet"
        if self.best is not None:
            yield f"best: step {self.best['step']}, {self.best['metric']} {self.best['value']:.6g}"
        yield f"{self.tokens} tokens trained in {self.training_s:.1f} s, {_show(self.tokens_per_s, '.0f')} tokens/s"
        if self.skipped_rows:
            yield f"{self.skipped_rows} rows were left out: too long, or without a token to train"
        if self.checkpoint is not None:
            yield f"checkpoint: {self.checkpoint}; `rollmesh export {self.folder} OUT` makes a model of it"


def training_records(folder: Path) -> list[Record]:
    """The records of a training's steps, without those that a restart has undone."""
    kept: list[Record] = []
    for record in read_metrics(folder / METRICS):
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
        accuracy_first=metric_value(records[0], _ACCURACY) if records else None,
        accuracy_last=metric_value(last, _ACCURACY),
        checkpoint=checkpoint_folders(folder)[0],
    )


def write_training_summary(folder: Path, command: str, ended: str, began_s: float) -> TrainingSummary:
    """Builds the summary of a training that has ended, and writes it into its folder.

    Args:
        folder, command, ended: see `build_training_summary`.
        began_s: `time.monotonic` at the begin of the process.
    """
    summary = build_training_summary(folder, command, ended, time.monotonic() - began_s)
    keep_summary(folder, summary)
    return summary


def read_training_summary(folder: Path) -> TrainingSummary:
    """The summary in a training's folder.

    Raises:
        DataError: no summary, or one of another program.
    """
    return kept_summary(TrainingSummary, folder)


def _total(records: list[Record], name: str) -> float:
    return sum(metric_value(record, name) or 0.0 for record in records)


def _accuracy(first: float | None, last: float | None) -> str:
    return "" if first is None or last is None else f", accuracy {first:.1%} -> {last:.1%}"


def _show(value: float | None, form: str = ".4f") -> str:
    return "-" if value is None else format(value, form)
