"""Events of a run: shown by its view and written to `logs/launcher.log`.

Invariant: neither an unseen view nor a full disk ends the run.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from rollmesh.launcher.console.view import View
from rollmesh.launcher.service_process import log_file

LOG = "launcher"


class EventLog:
    """Shows events and logs them.

    Args:
        view: shows each event.
        folder: run folder.
    """

    def __init__(self, view: View, folder: Path) -> None:
        self._view = view
        self._path = log_file(folder, LOG)
        self._unseen = ""

    def record(self, text: str) -> None:
        """Shows and logs an event."""
        self._view.event(text)
        self._append(text)
        self.check_view()

    def check_view(self) -> None:
        """Logs, once, the reason why the view cannot be seen."""
        before, self._unseen = self._unseen, self._view.write_error
        if self._unseen and not before:
            self._append(f"the view cannot be shown ({self._unseen}); the run continues without it")

    def _append(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
