"""Evidence: each verdict with its reason, as lines of JSON in a file of the user's."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

from rollmesh.mesh.private_files import check_closed

log = logging.getLogger(__name__)
_MOST_BYTES = 1 << 30
# Records that may wait for a slow disk; further ones are left out, for scoring waits for none.
_MOST_WAITING = 10_000


class Evidence:
    """Appends records, in a thread, to a file that is closed to others; a disk that refuses ends it, and no scoring.

    Args:
        path: of the file; several processes may share it. None: nothing is kept.

    Raises:
        ConfigError: the file is there, and other users may read or change it.
    """

    def __init__(self, path: Path | None) -> None:
        if path is not None and path.exists():
            check_closed(path, "reward.judge.evidence_file")
        self._path = path
        self._writer = None if path is None else ThreadPoolExecutor(1, thread_name_prefix="judge-evidence")
        self._room = BoundedSemaphore(_MOST_WAITING)

    def add(self, record: Mapping[str, Any]) -> None:
        """Has one record written, whole."""
        if self._path is None or self._writer is None or not self._room.acquire(blocking=False):
            return
        self._writer.submit(self._write, self._path, record)

    async def start(self) -> None:
        """Nothing: the file is opened for each record."""

    async def close(self) -> None:
        """Writes what waits, and ends the thread."""
        if self._writer is not None:
            await asyncio.to_thread(self._writer.shutdown)
            self._writer = None

    def _write(self, path: Path, record: Mapping[str, Any]) -> None:
        self._room.release()
        if self._path is None:
            return
        line = json.dumps(record, ensure_ascii=True, default=str).encode() + b"\n"
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            try:
                if os.fstat(file).st_size + len(line) > _MOST_BYTES:
                    raise OSError(f"it holds {_MOST_BYTES >> 30} GiB, which is the most")
                os.write(file, line)
            finally:
                os.close(file)
        except OSError as error:
            log.warning("reward.judge.evidence_file %s gets no more verdicts: %s", path, error)
            self._path = None
