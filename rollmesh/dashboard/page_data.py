"""All data of the page as JSON texts, each with a tag that changes with it.

Invariants: a panel that has not changed is neither sent nor drawn again. Panels that grow with the run are made at most
every few seconds, however often they are asked for. So they take a small share of the time. A panel that cannot be
made, as of a damaged file, costs no other one: what is wrong stands under what needs attention.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from rollmesh.dashboard.documents.settings import compare_settings
from rollmesh.dashboard.panels import PANELS, DocumentOf
from rollmesh.dashboard.run_view import RunView

log = logging.getLogger(__name__)
_ATTENTION = "attention"
# Their data grow with the run.
_SLOW = frozenset({"charts", "metrics", "samples", "evaluations", "settings"})
_SLOW_S = 5.0
# So many times the time that a panel has taken passes before it is made again.
_REST = 20.0


@dataclass(frozen=True, slots=True)
class Panel:
    """The JSON text of a panel, and its tag."""

    text: str
    tag: str

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Panel:
        """Serializes a document; NaN and infinities, which JSON has none of, become null."""
        try:
            text = _to_json(document)
        except ValueError:
            text = _to_json(_finite(document))
        # Texts of data may have characters that cannot be encoded.
        encoded = text.encode("utf-8", "replace")
        return cls(encoded.decode(), xxhash.xxh3_64_hexdigest(encoded))


def _to_json(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    """A value of JSON without NaN and infinities: a diverged run has them in its metrics and rewards."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


class RunPanels:
    """The panels of one run."""

    def __init__(self) -> None:
        self.panels: dict[str, Panel] = {}
        # Monotonic seconds from which a panel is made again.
        self._due: dict[str, float] = {}
        self._was_in_progress: bool | None = None
        # Panels that cannot be made, and why.
        self._failures: dict[str, str] = {}

    def update(self, view: RunView) -> None:
        """Makes the panels of a run as it is now."""
        turned, self._was_in_progress = view.in_progress is not self._was_in_progress, view.in_progress
        for name, document_of in PANELS.items():
            began = time.monotonic()
            if name in _SLOW and not turned and began < self._due.get(name, began):
                continue
            panel = self._made(name, document_of, view)
            self._due[name] = began + max(_SLOW_S, _REST * (time.monotonic() - began))
            if panel is None:
                self.panels.pop(name, None)
            else:
                self.panels[name] = panel
        if self._failures:
            self.panels[_ATTENTION] = self._with_failures()

    def _made(self, name: str, document_of: DocumentOf, view: RunView) -> Panel | None:
        try:
            document = document_of(view)
            panel = None if document is None else Panel.of(document)
        except Exception as error:
            # Files of a run may hold anything: a disk was full, or someone has edited them.
            if name not in self._failures:
                log.warning("the panel %s of %s cannot be made", name, view.name, exc_info=True)
            self._failures[name] = f"{type(error).__name__}: {error}"
            return None
        self._failures.pop(name, None)
        return panel

    def _with_failures(self) -> Panel:
        """The panels that cannot be made, and then all else that needs attention."""
        known = self.panels.get(_ATTENTION)
        items = json.loads(known.text)["items"] if known is not None else []
        remedy = "is a file in the run's folder damaged? The log of this command says where it was read"
        failed = [
            {"level": "error", "text": f"{name} cannot be shown: {why}", "remedy": remedy}
            for name, why in self._failures.items()
        ]
        return Panel.of({"items": [*failed, *items]})


class PageData:
    """The data of all runs of a page, side by side."""

    def __init__(self) -> None:
        self._runs: list[RunPanels] = []
        self._index = Panel.of({})

    @property
    def index(self) -> Panel:
        """The runs, the tags of their panels, and the settings in which they differ."""
        return self._index

    def panel(self, run: int, name: str) -> Panel | None:
        """A panel of a run by its place; None for one that is not there."""
        return self._runs[run].panels.get(name) if 0 <= run < len(self._runs) else None

    def update(self, views: Sequence[RunView]) -> None:
        """Makes the data of runs as they are now."""
        self._runs = self._runs if len(self._runs) == len(views) else [RunPanels() for _ in views]
        for panels, view in zip(self._runs, views, strict=True):
            panels.update(view)
        self._index = Panel.of(
            {
                "live": any(view.in_progress for view in views),
                "runs": [
                    {
                        "name": _title(view, views),
                        "panels": {name: panel.tag for name, panel in panels.panels.items()},
                    }
                    for view, panels in zip(views, self._runs, strict=True)
                ],
                "differences": compare_settings([view.config for view in views]),
            }
        )

    def document(self) -> dict[str, Any]:
        """Everything in one, for a page in one file: the index, and each run's panels."""
        return {
            "index": json.loads(self._index.text),
            "panels": [{name: json.loads(panel.text) for name, panel in run.panels.items()} for run in self._runs],
        }


def _title(view: RunView, views: Sequence[RunView]) -> str:
    """The name of a run; with its folder where several have the same."""
    same = [other for other in views if other.name == view.name]
    return view.name if len(same) == 1 or view.folder is None else str(view.folder)
