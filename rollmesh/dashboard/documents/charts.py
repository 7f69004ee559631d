"""The charts of a run, and its single metrics."""

from __future__ import annotations

from typing import Any

from rollmesh.dashboard.curves.chart import Axes, Curve, Rows, charts_document
from rollmesh.dashboard.curves.charts_of_runs import charts_of_run
from rollmesh.dashboard.curves.charts_of_trainings import charts_of_training
from rollmesh.dashboard.curves.columns import RecordColumns
from rollmesh.dashboard.curves.derived import token_ages, with_rates
from rollmesh.dashboard.curves.memory import memory_columns, turn_spans
from rollmesh.dashboard.curves.reduction import MOST_POINTS
from rollmesh.dashboard.run_view import RunView
from rollmesh.learner.metrics.catalogue import CATALOGUE, describe
from rollmesh.report.memory import read_memory
from rollmesh.report.turns import read_phases
from rollmesh.run_files import RUN

_ALIASES = frozenset(alias for section in CATALOGUE.values() for metric in section for alias in metric.aliases)
# There may be hundreds of metrics.
_POINTS_OF_METRICS = 300
_NOT_DRAWN = frozenset({"step", "steps", "time", "version", "incarnation", "eval/version"})


def chart_document(view: RunView) -> dict[str, Any] | None:
    """The charts that have values, by section; None before the first value."""
    found = _of_run(view) if view.command == RUN else charts_document(charts_of_training(), _axes(view))
    return found if found["charts"] else None


def _of_run(view: RunView) -> dict[str, Any]:
    steps = view.steps.extended(token_ages(view.steps))
    samples = read_memory(view.folder) if view.folder is not None else []
    memory = memory_columns(samples)
    phases = read_phases(view.folder) if view.folder is not None else []
    columns: dict[Rows, RecordColumns] = {
        "steps": steps,
        "evaluations": view.evaluations,
        "snapshots": with_rates(view.snapshots),
        "memory": memory,
    }
    turns = turn_spans(phases, view.start, samples[-1].unix_s if samples else 0.0)
    return charts_document(charts_of_run(view.run_config, steps, memory, turns), Axes(columns, view.start))


def metric_document(view: RunView) -> dict[str, Any] | None:
    """Every metric of steps with its values, meaning and unit, for a reader who looks for one; None without any."""
    axes = _axes(view, points=_POINTS_OF_METRICS, ranges=False)
    found = []
    for name in view.steps.names():
        if name in _NOT_DRAWN or name in _ALIASES or (values := axes.curve(Curve(name, name))) is None:
            continue
        described = describe(name)
        meaning, unit = (described.meaning, described.unit) if described is not None else ("", "")
        found.append({"meaning": meaning, "unit": unit, **values})
    if not found:
        return None
    return {"axis": axes.document()["steps"], "metrics": sorted(found, key=lambda item: str(item["metric"]))}


def _axes(view: RunView, points: int = MOST_POINTS, *, ranges: bool = True) -> Axes:
    columns: dict[Rows, RecordColumns] = {"steps": view.steps, "evaluations": view.evaluations}
    return Axes(columns, view.start, points, ranges)
