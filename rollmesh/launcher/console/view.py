"""Views of a run: a live one in a terminal, plain lines elsewhere.

Invariant: a view only shows; the run is the same with every view, read or not.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Protocol

from rollmesh.launcher.console.live import LiveView
from rollmesh.launcher.console.plain import PlainView
from rollmesh.launcher.console.progress import Progress
from rollmesh.launcher.mesh_client import Snapshot
from rollmesh.mesh.config.models import Config
from rollmesh.report.metrics import Record


class View(Protocol):
    """Shows a run; called on the launcher's event loop, so no call but `close` waits.

    Attributes:
        write_error: why the latest text could not be shown; empty where it could.
    """

    @property
    def write_error(self) -> str: ...

    def event(self, text: str) -> None:
        """Shows an event: a start, a death, a restart."""

    def tail(self, service: str, lines: Sequence[str]) -> None:
        """Shows the last log lines of a service that failed."""

    def update(self, snapshot: Snapshot, records: Sequence[Record]) -> None:
        """Shows the mesh as it is now, with the new metrics records."""

    def close(self) -> None:
        """Ends the view."""


def open_view(config: Config) -> View:
    """The live view where stdout is a terminal, plain lines elsewhere."""
    if sys.stdout is None:
        return SilentView()
    if sys.stdout.isatty():
        return LiveView(config)
    return PlainView(config.logging.console_every_steps, progress=Progress.of_run(config))


class SilentView:
    """Shows nothing (the Python API with `quiet`; stdout is closed)."""

    write_error = ""

    def event(self, text: str) -> None:
        pass

    def tail(self, service: str, lines: Sequence[str]) -> None:
        pass

    def update(self, snapshot: Snapshot, records: Sequence[Record]) -> None:
        pass

    def close(self) -> None:
        pass
