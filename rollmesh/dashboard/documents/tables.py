"""Panels that are plain tables: evaluations, stalls, memory, and the summary in words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rollmesh.dashboard.documents import responses
from rollmesh.dashboard.run_view import RunView
from rollmesh.learner.checkpoint.best import best_checkpoint
from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME
from rollmesh.report.evals import result_grid
from rollmesh.report.memory import memory_grid
from rollmesh.report.placement import placement_lines
from rollmesh.report.speed import speed_lines
from rollmesh.report.stalls import read_stalls, stall_grid
from rollmesh.report.turns import share_lines, swap_lines
from rollmesh.run_files import RUN
from rollmesh.training.results import evaluation_rows
from rollmesh.training.summary import TrainingSummary

Grid = list[list[str]]


def evaluation_document(view: RunView) -> dict[str, Any] | None:
    """Evaluations by version; None without any."""
    if view.folder is None:
        return None
    if view.evaluation is not None:
        return _table(responses.result_grid(view.evaluation))
    if view.command == RUN:
        return _table(result_grid(view.folder))
    return _table(evaluation_rows(_evaluations(view), best_checkpoint(view.folder / CHECKPOINTS_NAME)))


def _evaluations(view: RunView) -> list[dict[str, float]]:
    """Evaluations of a training on data: step, and metrics without `eval/`."""
    columns = {
        name.removeprefix("eval/"): view.evaluations.column(name)
        for name in view.evaluations.names()
        if name == "step" or name.startswith("eval/")
    }
    return [
        {name: float(values[row]) for name, values in columns.items() if not math.isnan(values[row])}
        for row in range(len(view.evaluations))
    ]


def stall_document(view: RunView) -> dict[str, Any] | None:
    """Times in which nothing moved; None without any."""
    stalls = read_stalls(view.folder) if view.folder is not None and view.command == RUN else []
    return _table(stall_grid(stalls)) if stalls else None


def memory_document(view: RunView) -> dict[str, Any] | None:
    """Peak memory by phase of turns and service; None without shared devices."""
    summary = view.run_summary
    return _table(memory_grid(summary.memory_by_phase_mb)) if summary and summary.memory_by_phase_mb else None


def facts_document(view: RunView) -> dict[str, Any] | None:
    """The summary of a run that has ended, in words; None before."""
    facts = [[name, text] for name, text in _facts(view) if text]
    return {"head": ["", ""], "rows": facts} if facts else None


def _facts(view: RunView) -> Iterator[tuple[str, str]]:
    if isinstance(view.summary, TrainingSummary):
        speed = f", {view.summary.tokens_per_s:,.0f} tokens/s" if view.summary.tokens_per_s else ""
        yield "training", f"{view.summary.tokens:,} tokens in {view.summary.training_s:.1f} s{speed}"
        yield "rows left out", str(view.summary.skipped_rows or "")
        yield "speed of the steps", ", ".join(speed_lines(view.summary.speed))
    if (summary := view.run_summary) is None:
        return
    yield "training", f"{summary.training_s:.1f} s, waiting included; the last launch took {summary.wall_s:.1f} s"
    yield "speed of the learner's steps", ", ".join(speed_lines(summary.speed))
    yield "groups", _pairs(summary.groups_by_fate, "d")
    yield "waited, in seconds", _pairs(summary.waiting_s, ".1f")
    yield "peak memory, MiB", _pairs(summary.peak_memory_mb, ".0f")
    yield "placement", "; ".join((*placement_lines(summary.placement), *share_lines(summary.swaps)))
    yield "swaps of shared devices", "; ".join(swap_lines(summary.swaps))
    yield "restarts", summary.restarts_text()
    yield "graders", ", ".join(f"{name} {version}" for name, version in summary.graders.items())


def _pairs(values: dict[str, int] | dict[str, float], form: str) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:{form}}" for name, value in values.items())


def _table(grid: Grid) -> dict[str, Any] | None:
    """A table of its head and its rows; None without rows."""
    return {"head": grid[0], "rows": grid[1:]} if len(grid) > 1 else None
