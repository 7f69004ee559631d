"""A chart of the page: its curves by the names of metrics, and its data as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rollmesh.dashboard.curves.columns import Column, RecordColumns
from rollmesh.dashboard.curves.reduction import MOST_POINTS, Buckets, rounded

Rows = Literal["steps", "evaluations", "snapshots", "memory"]
"""Records from which a curve is drawn; they are also the axes of the page."""
Form = Literal["line", "points", "area", "step"]


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve.

    Attributes:
        metric: name of the column.
        label: in the legend.
        rows: of which it has one value each.
        form: how it is drawn; areas are stacked.
        noisy: it is smoothed on the page, and the values are shown faintly too.
    """

    metric: str
    label: str
    rows: Rows = "steps"
    form: Form = "line"
    noisy: bool = False


@dataclass(frozen=True, slots=True)
class Bound:
    """A horizontal line with its label."""

    value: float
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart; it is left out where none of its curves has a value.

    Attributes:
        name: stable, for links and for the same chart of another run.
        section: of the page: `learning`, `staleness` or `time`.
        title: in a few words.
        unit: of the values; empty: a plain number.
        curves: in the order of the legend.
        note: what a reader has to know.
        bounds: lines to compare with.
        share: values are 0 to 1.
        by_time: it is drawn over time only, since its curves have no steps.
        spans: phases of turns in the background (`curves.memory.turn_spans`).
    """

    name: str
    section: str
    title: str
    unit: str
    curves: Sequence[Curve]
    note: str = ""
    bounds: Sequence[Bound] = ()
    share: bool = False
    by_time: bool = False
    spans: Sequence[dict[str, Any]] = ()


@dataclass(slots=True)
class Axes:
    """Rows of a run as they are drawn: buckets, and the values of both axes by kind of rows.

    Attributes:
        columns: by kind of rows.
        start: Unix time in seconds from which time counts.
        points: of a curve at most.
        ranges: curves have the range of the values of each point.
    """

    columns: dict[Rows, RecordColumns]
    start: float
    points: int = MOST_POINTS
    ranges: bool = True
    buckets: dict[Rows, Buckets] = field(init=False)

    def __post_init__(self) -> None:
        self.buckets = {rows: Buckets.of(len(columns), self.points) for rows, columns in self.columns.items()}

    def document(self) -> dict[str, Any]:
        """Steps and seconds of each kind of rows."""
        return {
            rows: {
                "step": rounded(buckets.last_of(self.columns[rows].column("step")), 12),
                "seconds": rounded(buckets.last_of(self.columns[rows].column("time") - self.start), 7),
                "rows": buckets.rows,
                "size": buckets.size,
            }
            for rows, buckets in self.buckets.items()
        }

    def curve(self, curve: Curve) -> dict[str, Any] | None:
        """The values of a curve; None where it has none."""
        columns, buckets = self.columns[curve.rows], self.buckets[curve.rows]
        if not columns.has(curve.metric):
            return None
        return {"metric": curve.metric, **self.values(columns.column(curve.metric), buckets)}

    def values(self, column: Column, buckets: Buckets) -> dict[str, Any]:
        """A column as JSON: means, and the range where a point is of several rows."""
        found: dict[str, Any] = {"y": rounded(buckets.mean_of(column))}
        if self.ranges and buckets.size > 1:
            low, high = buckets.range_of(column)
            found |= {"low": rounded(low), "high": rounded(high)}
        known = column[~np.isnan(column)]
        found["last"] = rounded(known[-1:])[0] if known.size else None
        return found


def charts_document(charts: Sequence[Chart], axes: Axes) -> dict[str, Any]:
    """The charts that have values, and the axes that their curves share."""
    return {"axes": axes.document(), "charts": list(_documents(charts, axes))}


def _documents(charts: Sequence[Chart], axes: Axes) -> Iterator[dict[str, Any]]:
    for chart in charts:
        curves = [
            {"label": curve.label, "rows": curve.rows, "form": curve.form, "noisy": curve.noisy, **found}
            for curve in chart.curves
            if (found := axes.curve(curve)) is not None
        ]
        if curves:
            yield {
                "name": chart.name,
                "section": chart.section,
                "title": chart.title,
                "unit": chart.unit,
                "note": chart.note,
                "share": chart.share,
                "by_time": chart.by_time,
                "spans": list(chart.spans),
                "bounds": [{"value": bound.value, "label": bound.label} for bound in chart.bounds],
                "curves": curves,
            }
