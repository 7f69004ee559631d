"""The page of a run in progress, served by its launcher on loopback (`logging.dashboard_port`).

Invariant: the key of the page is shown, and stands in no file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from rollmesh.dashboard.server import page_server
from rollmesh.launcher.page.live_runs import FolderRuns

_HOST = "127.0.0.1"


async def serve_run_page(folder: Path, port: int, show: Callable[[str], None]) -> None:
    """Serves the page of a run until cancelled.

    Args:
        folder: of the run, whose configuration is written.
        port: on loopback; 0: a free one.
        show: shows the URL to the user, and to no log.

    Raises:
        PortInUseError: the port is taken.
    """
    async with page_server(FolderRuns([folder]), host=_HOST, port=port) as url:
        show(f"page of the run: {url}")
        await asyncio.Event().wait()
