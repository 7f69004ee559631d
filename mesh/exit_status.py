"""How a service's own exit status reaches the launcher through a wrapper that ends with another one (torchrun)."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "ROLLMESH_EXIT_FILE"


def leave(status: int) -> None:
    """Called by a service that fails: writes its status where the launcher looks, if there is a launcher."""
    path = os.environ.get(VARIABLE)
    if path and status != 0:
        Path(path).write_text(str(status), encoding="utf-8")


def find(path: Path) -> int | None:
    """The status that was left; None where there is none."""
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
