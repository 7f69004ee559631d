"""The way of weights to each generator."""

from __future__ import annotations

from typing import Any

from rollmesh.dashboard.run_view import RunView
from rollmesh.report.pushes import live_rows, push_rows, read_receivers, transport_choices

# Generators in the table; the curves of pushes are over all of them.
_MOST_ROWS = 64


def push_document(view: RunView) -> dict[str, Any] | None:
    """A table with its head; None where nothing is known of pushes."""
    if view.mesh is not None and view.mesh.pushes is not None:
        rows, notes = live_rows(view.mesh.pushes), transport_choices(view.mesh.pushes)
    elif view.run_summary is not None and view.folder is not None and (found := read_receivers(view.folder)):
        rows, notes = push_rows(view.run_summary, found), []
    else:
        return None
    head, *body = rows
    left_out = max(0, len(body) - _MOST_ROWS)
    if left_out:
        notes = [*notes, f"{left_out} more generators are left out"]
    return {"head": head, "rows": body[:_MOST_ROWS], "notes": notes} if body else None
