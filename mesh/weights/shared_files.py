"""Files of published weights in shared memory: where they lie, and how they are named.

Publishers make no others, and receivers open no others: a path that comes from the network leads to nothing else.
"""

from __future__ import annotations

import os
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  meant to be shared; files are created unnamed and readable by the owner only
FILE_PREFIX = "rollmesh-weights-"


def is_shared_file(address: str, directory: Path) -> bool:
    """True if a path names a publisher's file directly in `directory`."""
    folder, name = os.path.split(address)
    return folder == str(directory) and name.startswith(FILE_PREFIX) and "\0" not in name
