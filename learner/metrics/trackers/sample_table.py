"""Kept samples as the rows of a table, the same in every tracker."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rollmesh.learner.metrics.trackers.interface import Sample

TABLE = "completions"
"""Name of the table in every tracker, which is TRL's."""
COLUMNS = ("step", "data_source", "prompt", "completion", "reward", "components", "ground_truth", "finish_reason")
_KEYS = {"completion": "response"}
Cell = str | float


def rows(samples: Sequence[Sample]) -> list[list[Cell]]:
    """A row for each sample, with numbers as they are and all else as text."""
    return [[_cell(sample.get(_KEYS.get(column, column))) for column in COLUMNS] for sample in samples]


def as_markdown(samples: Sequence[Sample]) -> str:
    """The table in Markdown; a cell stays on its row, and cannot begin another one."""
    header = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    body = [f"| {' | '.join(_escape(cell) for cell in row)} |" for row in rows(samples)]
    return "\n".join([*header, *body])


def _cell(value: object) -> Cell:
    if isinstance(value, str | float | int) and not isinstance(value, bool):
        return value
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _escape(cell: Cell) -> str:
    text = str(cell).replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return " ↵ ".join(text.splitlines())
