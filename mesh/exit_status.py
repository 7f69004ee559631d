"""How a service's own exit status reaches the launcher through a wrapper that ends with another one (torchrun)."""

from __future__ import annotations

import logging
import os
from pathlib import Path

_log = logging.getLogger(__name__)
VARIABLE = "ROLLMESH_EXIT_FILE"


def leave(status: int) -> None:
    """Called by a service that ends: writes its status where the launcher looks, if there is a launcher.

    Of several processes of one service the one that fails counts. Where a disk takes no status, the process still ends
    with it.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return
    try:
        with Path(path).open("w" if status else "x", encoding="utf-8") as file:
            file.write(str(status))
    except FileExistsError:
        return
    except OSError as error:
        _log.warning("cannot write the exit status %d to %s: %s", status, path, error.strerror)


def find(path: Path) -> int | None:
    """The status that was left; None where there is none."""
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
