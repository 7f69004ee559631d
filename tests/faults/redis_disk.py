"""The files of Redis on disk, and the loss of their end.

A `Snapshot` is the append-only file as it is now: the file itself under a second name, and its size. The file only
grows, and a rewrite puts another one in its place. Redis is killed later, and started on what the snapshot had. The
commands of the time between are lost although they were acknowledged. So it is after a power cut with `everysec`, a
failover, or a backup that was put back. Whole transactions are lost. Where the end of one is torn, a plain redis-server
does the first half at its second start (the embedded one does not: `buffer.redis_backend.embedded`).

Invariant: everything that Redis acknowledged outside of the `losses` is in what it was started on.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Durability = Literal["always", "everysec"]
_FILE, _SNAPSHOT = "appendonly.aof", "snapshot.aof"


@dataclass(frozen=True, slots=True)
class Loss:
    """Writes that Redis acknowledged in this time may be gone.

    Attributes:
        began, ended: of the time, in seconds since 1970.
    """

    began: float
    ended: float

    def covers(self, at: float) -> bool:
        return self.began <= at <= self.ended


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The append-only file at a moment.

    Attributes:
        size: in bytes.
        written: when its last bytes came, in seconds since 1970.
    """

    size: int
    written: float


class RedisDisk:
    """The data folder of the redis-server under test.

    Args:
        folder: for the data.
        durability: of the server; with `everysec` every end of the process may lose what was not written yet.
    """

    def __init__(self, folder: Path, durability: Durability) -> None:
        self._folder = folder
        self._durability = durability
        self._lock = threading.Lock()
        self._due: Snapshot | None = None
        self.losses: list[Loss] = []
        folder.mkdir(exist_ok=True)

    def options(self) -> list[str]:
        """For redis-server."""
        settings = {"dir": str(self._folder), "appendonly": "yes", "appendfsync": self._durability, "save": ""}
        return [part for key, value in settings.items() for part in (f"--{key}", value)]

    def snapshot(self) -> Snapshot:
        """The state on disk now; the one before is given up."""
        kept = self._folder / _SNAPSHOT
        kept.unlink(missing_ok=True)
        os.link(self._folder / _FILE, kept)
        found = kept.stat()
        return Snapshot(found.st_size, found.st_mtime)

    def lose(self, since: Snapshot) -> None:
        """The next start finds what there was at a snapshot."""
        with self._lock:
            self._due = since

    def empty(self) -> None:
        """The next start finds nothing."""
        self.lose(Snapshot(0, 0.0))

    def before_start(self) -> None:
        """Called before each start, while no server runs: does what is due."""
        path, kept = self._folder / _FILE, self._folder / _SNAPSHOT
        if not path.exists():
            return
        with self._lock:
            due, self._due = self._due, None
        now = time.time()
        if due is None:
            if self._durability == "everysec":
                # Acknowledged before it was written: the kernel had been busy with the fsync of the second before.
                self.losses.append(Loss(path.stat().st_mtime, now))
            return
        if due.size == 0:
            path.unlink()
        else:
            os.truncate(kept, due.size)
            # Two names of one file are left alone by a renaming.
            if not path.samefile(kept):
                os.replace(kept, path)
        self.losses.append(Loss(due.written, now))
