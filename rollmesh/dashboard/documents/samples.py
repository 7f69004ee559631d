"""Kept samples of a run, with their rewards and the values of their tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rollmesh.dashboard.documents.responses import response_document
from rollmesh.dashboard.run_view import RunView
from rollmesh.mesh.errors import DataError
from rollmesh.report.samples import read_samples, read_spread
from rollmesh.run_files import RUN

_LATEST = 24
# Earlier places of the run, of which a step is shown each.
_PLACES = 8
# Characters of a text, and of all samples as JSON: the page is read over networks too.
_MOST_CHARACTERS = 200_000
_MOST_IN_ALL = 3_000_000
_TEXTS = ("prompt", "response", "ground_truth", "evidence")
_FIELDS = (
    *("step", "group", "member", "reward", "members", "data_source", "finish_reason", "generator", "temperature"),
    *("versions", "tokens", "cost", "cached"),
)


def sample_document(view: RunView) -> dict[str, Any] | None:
    """The latest samples, the newest first, and those of steps all over the run; None where none are kept."""
    if view.folder is not None and view.evaluation is not None:
        return response_document(view.folder)
    if view.folder is None or view.command != RUN:
        return None
    try:
        latest = read_samples(view.folder, worst=False, number=_LATEST)
        earlier = read_spread(view.folder, _PLACES)
    except DataError:
        return None
    samples = list(_that_fit(map(_sample, _distinct([*latest, *earlier]))))
    return {"samples": samples} if samples else None


def _distinct(samples: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Each sample once."""
    seen = set()
    for sample in samples:
        name = (sample.get("step"), sample.get("group"), sample.get("member"))
        if name not in seen:
            seen.add(name)
            yield sample


def _that_fit(samples: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The first samples, as many as a page can take; the first one however long it is."""
    size = 0
    for sample in samples:
        room = _MOST_IN_ALL - size
        size += len(json.dumps(sample))
        if room < _MOST_IN_ALL < size:
            return
        yield sample


def _sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    whole = {name: _text(sample.get(name, "")) for name in _TEXTS}
    texts = {name: text[:_MOST_CHARACTERS] for name, text in whole.items()}
    components = {name: value for name, value in (sample.get("components") or {}).items() if name != "total"}
    known = {name: sample[name] for name in _FIELDS if sample.get(name) is not None}
    return {"step": None, **known, **texts, "characters": len(whole["response"]), "components": components}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
