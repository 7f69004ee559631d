"""`report.html`: the page of a run as one file that needs nothing but itself and a browser."""

from __future__ import annotations

import json
from pathlib import Path

from rollmesh.dashboard.access import content_policy, source_of
from rollmesh.dashboard.page_data import PageData
from rollmesh.dashboard.page_files import MAIN, STYLE, embedded_plotly, fill_page, import_map, static_files
from rollmesh.dashboard.readers import open_reader
from rollmesh.dashboard.run_view import RunView
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.files import write_atomically
from rollmesh.run_files import SUMMARY

FILE = "report.html"


def write_report(folder: Path, *, ended: bool = False) -> Path:
    """Writes the report of a run folder; a run in progress is reported as far as it went.

    Args:
        folder: of the run.
        ended: see `RunReader`.

    Raises:
        DataError: the folder is not a run folder, or it has neither metrics nor a summary yet.
    """
    view = open_reader(folder, ended=ended).view
    if view.evaluation is None and not (len(view.steps) or len(view.evaluations) or (folder / SUMMARY).exists()):
        raise DataError(f"nothing to report in {folder}: it has no metrics yet", hint="train a step first")
    path = folder / FILE
    write_atomically(path, render_report(view))
    return path


def render_report(view: RunView) -> str:
    """The page of a run as one file."""
    data = PageData()
    data.update([view])
    imports = import_map(embedded=True)
    policy = content_policy(
        ["data:", "blob:", source_of(imports), source_of(MAIN)], [source_of(static_files()[STYLE])], ["'none'"]
    )
    document = json.dumps(data.document(), ensure_ascii=False, separators=(",", ":"))
    return fill_page(
        f"{view.name} · Rollmesh", imports, policy=policy, embedded={"data": document, "plotly": embedded_plotly()}
    )
