"""What happens in a run, told to its view and kept in `logs/launcher.log`.

Invariant: neither a view that no one sees nor a disk that takes nothing ends the run.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from rollmesh.launcher.console.view import View
from rollmesh.launcher.service_process import log_file

LOG = "launcher"


class Events:
    """Tells and keeps events.

    Args:
        view: shown each event.
        folder: run folder.
    """

    def __init__(self, view: View, folder: Path) -> None:
        self._view = view
        self._path = log_file(folder, LOG)
        self._unseen = ""

    def tell(self, text: str) -> None:
        """Something happened."""
        self._view.event(text)
        self._keep(text)
        self.look_at_view()

    def look_at_view(self) -> None:
        """Keeps the reason why the view cannot be seen, once."""
        before, self._unseen = self._unseen, self._view.trouble
        if self._unseen and not before:
            self._keep(f"the view cannot be shown ({self._unseen}); the run continues without it")

    def _keep(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
