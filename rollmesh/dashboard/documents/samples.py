"""Kept samples of a run, with their rewards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmesh.dashboard.documents.responses import response_document
from rollmesh.dashboard.run_view import RunView
from rollmesh.mesh.errors import DataError
from rollmesh.report.samples import read_samples
from rollmesh.run_files import RUN

_LATEST = 24
# Characters of a text: a page of long responses would be slow.
_MOST_CHARACTERS = 20_000
_TEXTS = ("prompt", "response", "ground_truth")
_FIELDS = ("step", "group", "member", "reward", "data_source", "finish_reason", "generator")


def sample_document(view: RunView) -> dict[str, Any] | None:
    """The latest samples, the newest first; None where none are kept."""
    if view.folder is not None and view.evaluation is not None:
        return response_document(view.folder)
    if view.folder is None or view.command != RUN:
        return None
    try:
        samples = read_samples(view.folder, worst=False, number=_LATEST)
    except DataError:
        return None
    return {"samples": [_sample(sample) for sample in samples]} if samples else None


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: str(sample.get(name, ""))[:_MOST_CHARACTERS] for name in _TEXTS}
    components = {name: value for name, value in (sample.get("components") or {}).items() if name != "total"}
    return {**{name: sample.get(name) for name in _FIELDS}, **texts, "components": components}
