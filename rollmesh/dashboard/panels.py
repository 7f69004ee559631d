"""The panels of the page: the data of each, in the order of the page.

A panel is a function here, in `documents/`, and a module of the same name in `static/panels/` that draws its data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollmesh.dashboard.documents import attention, charts, head, ledger, mesh, pushes, samples, settings, tables
from rollmesh.dashboard.run_view import RunView

Document = dict[str, Any]
"""JSON of one panel."""
DocumentOf = Callable[[RunView], Document | None]
"""From a run to the JSON of a panel."""
PANELS: dict[str, DocumentOf] = {
    "head": head.head_document,
    "attention": attention.attention_document,
    "mesh": mesh.mesh_document,
    "charts": charts.chart_document,
    "ledger": ledger.ledger_document,
    "pushes": pushes.push_document,
    "evaluations": tables.evaluation_document,
    "samples": samples.sample_document,
    "stalls": tables.stall_document,
    "memory": tables.memory_document,
    "facts": tables.facts_document,
    "metrics": charts.metric_document,
    "settings": settings.settings_document,
}
"""Name -> its data; None where a run has nothing to show there."""
