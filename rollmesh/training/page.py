"""`report.html` of a training on data: the page of a run, with what a training has."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from rollmesh.mesh.errors import DataError
from rollmesh.mesh.files import write_atomically
from rollmesh.report.html import FILE, draw_plots, fill_page, grid, table
from rollmesh.report.metrics import Record
from rollmesh.report.series import metric_value
from rollmesh.report.speed import speed_lines
from rollmesh.run_files import config_path
from rollmesh.training.summary import (
    HELD_OUT,
    LOSS,
    TrainingSummary,
    evaluations,
    training_records,
)

_NONE = "a training on data has none"


def write_training_report(folder: Path, summary: TrainingSummary) -> Path:
    """Writes the report of a training's folder; one in progress is reported as far as it went.

    Raises:
        DataError: it has no metrics yet.
    """
    records = training_records(folder)
    if not records:
        raise DataError(f"nothing to report in {folder}: it has no metrics yet", hint="train a step first")
    page = fill_page(
        title=f"Rollmesh: {summary.run}",
        plots=_plots(records),
        summary=table(_rows(summary)),
        pushes=grid([[f"weight pushes: {_NONE}"]]),
        stalls=grid([[f"stalls: {_NONE}"]]),
        memory=grid([[f"turns: {_NONE}"]]),
        evals=grid(training_result_grid(folder) or [["no held-out data"]]),
        samples=f"<tr><td>responses: {_NONE}</td></tr>",
        config=escape(config_path(folder).read_text(encoding="utf-8")),
    )
    write_atomically(folder / FILE, page)
    return folder / FILE


def training_result_grid(folder: Path) -> list[list[str]]:
    """The evaluations as a table with its head, the best one marked; empty without any."""
    from rollmesh.learner.checkpoint.best import best_checkpoint
    from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME

    found = evaluations(training_records(folder))
    if not found:
        return []
    names = list(dict.fromkeys(name for one in found for name in one if name != "step"))
    best = best_checkpoint(folder / CHECKPOINTS_NAME)
    rows = [["step", *names, ""]]
    for one in found:
        mark = f"best by {best.metric}" if best is not None and best.version == one["step"] else ""
        cells = (f"{one[name]:.4f}" if name in one else "-" for name in names)
        rows.append([f"{one['step']:.0f}", *cells, mark])
    return rows


def _plots(records: list[Record]) -> str:
    # Matplotlib takes half a second.
    from rollmesh.report.plots import over_steps

    def series(name: str) -> tuple[list[int], list[float | None]]:
        there = [record for record in records if name in record]
        return [int(record["step"]) for record in there], [metric_value(record, name) for record in there]

    drawn = [
        ("Loss over steps", over_steps({"training": series(LOSS), "held out": series(HELD_OUT)}, "loss")),
        ("Throughput", over_steps({"trained": series("tokens_per_second")}, "tokens per second")),
        ("Learning rate", over_steps({"learning rate": series("actor/lr")}, "learning rate")),
    ]
    return draw_plots(drawn)


def _rows(summary: TrainingSummary) -> Iterator[tuple[str, str]]:
    yield "command", f"rollmesh {summary.command}"
    yield "ended", summary.ended or "not known"
    for line in list(summary.lines())[1:]:
        name, _, text = line.partition(" ")
        yield name.rstrip(":,"), text
    if summary.speed:
        yield "speed of the steps", ", ".join(speed_lines(summary.speed))
