"""All data of the page as JSON texts, each with a tag that changes with it.

Invariants: a panel that has not changed is neither sent nor drawn again. Panels that grow with the run are made at most
every few seconds, however often they are asked for. So they take a small share of the time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from rollmesh.dashboard.documents.settings import compare_settings
from rollmesh.dashboard.panels import PANELS
from rollmesh.dashboard.run_view import RunView

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
        """Serializes a document; it has neither NaN nor infinities."""
        text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return cls(text, xxhash.xxh3_64_hexdigest(text.encode()))


class RunPanels:
    """The panels of one run."""

    def __init__(self) -> None:
        self.panels: dict[str, Panel] = {}
        # Monotonic seconds from which a panel is made again.
        self._due: dict[str, float] = {}

    def update(self, view: RunView) -> None:
        """Makes the panels of a run as it is now."""
        for name, document_of in PANELS.items():
            began = time.monotonic()
            if name in _SLOW and view.in_progress and began < self._due.get(name, began):
                continue
            document = document_of(view)
            self._due[name] = began + max(_SLOW_S, _REST * (time.monotonic() - began))
            if document is None:
                self.panels.pop(name, None)
            else:
                self.panels[name] = Panel.of(document)


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
