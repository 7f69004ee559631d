"""The id of a run, by which trackers know it: the same for every learner that continues the run.

Its name does not suffice. Two folders may hold runs of one name, and `--fresh` begins another run under it.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from rollmesh.mesh.errors import DataError
from rollmesh.mesh.files import write_atomically

RUN_ID = "run_id"
"""File in a run folder."""


def take_run_id(folder: Path, name: str) -> str:
    """The id of the run; a new run gets one.

    Args:
        folder: of the run; made where it is missing.
        name: of the run, with which a new id begins.

    Raises:
        DataError: the disk refuses.
    """
    try:
        if (known := read_run_id(folder)) is not None:
            return known
        folder.mkdir(parents=True, exist_ok=True)
        new = f"{name}-{secrets.token_hex(4)}"
        write_atomically(folder / RUN_ID, f"{new}\n", durable=True)
    except OSError as error:
        raise DataError(
            f"cannot use {folder / RUN_ID}: {error.strerror or error}", hint="free space, or set run.dir"
        ) from error
    return new


def read_run_id(folder: Path) -> str | None:
    """The id of a run; None where it was never asked for.

    Raises:
        OSError: the disk refuses.
    """
    path = folder / RUN_ID
    return path.read_text(encoding="utf-8").strip() or None if path.exists() else None
