"""The time in which this host has had too few processors. Source: Documentation/accounting/psi.rst of Linux."""

from __future__ import annotations

import os

_FILE = "/proc/pressure/cpu"


class Pressure:
    """The kernel's account of waits for processors; it has none if it was built or started without."""

    def __init__(self) -> None:
        try:
            self._file = os.open(_FILE, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1

    def stalled_s(self) -> float | None:
        """Seconds since the host's start in which a process that could run had no processor; None: unknown."""
        try:
            some = os.pread(self._file, 4096, 0).split(b"\n")[0]
            return int(some.rpartition(b"total=")[2]) / 1e6
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """Asks no more."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
