"""The cgroup of one sandbox."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

from rollmesh.reward_service.sandbox.cgroups.decisions import bounds, kills
from rollmesh.reward_service.sandbox.interface import Limits

log = logging.getLogger(__name__)
# Seconds for killed processes to be gone, and between two looks.
_END_S, _PAUSE_S = 5.0, 0.005


class Cgroup:
    """Bounds of a sandbox with all that it starts. Invariant: once `end` has returned, nothing is left of it.

    Args:
        folder: its own.
        controllers: that it has.
    """

    def __init__(self, folder: Path, controllers: frozenset[str]) -> None:
        self.folder = folder
        self._controllers = controllers
        self._bounds: dict[str, int] = {}
        self._kills = 0

    def can_be_killed(self) -> bool:
        """True if the kernel kills all that is in it at once: since Linux 5.14."""
        return (self.folder / "cgroup.kill").exists()

    def enter(self, pid: int) -> None:
        """Moves a process into it; what that starts from now on is in it as well.

        Raises:
            OSError: it may not be moved.
        """
        (self.folder / "cgroup.procs").write_text(str(pid))

    def bound(self, limits: Limits, content: int) -> None:
        """Sets the bounds of a job; see `bounds`.

        Raises:
            OSError: they cannot be set.
        """
        wanted = bounds(limits, content, self._controllers)
        for name, value in wanted.items():
            # A kernel that counts no swap has no such file.
            if self._bounds.get(name) != value and (name != "memory.swap.max" or (self.folder / name).exists()):
                (self.folder / name).write_text(str(value))
        self._bounds = wanted

    def has_killed(self) -> bool:
        """True if the kernel has killed a process over the bound of memory since the last call."""
        if "memory" not in self._controllers:
            return False
        before, self._kills = self._kills, kills((self.folder / "memory.events").read_text())
        return self._kills > before

    def end(self) -> None:
        """Kills what is in it, and removes it."""
        if self.can_be_killed():
            with contextlib.suppress(OSError):
                (self.folder / "cgroup.kill").write_text("1")
        ends = time.monotonic() + _END_S
        while True:
            try:
                self.folder.rmdir()
            except FileNotFoundError:
                return
            except OSError as error:  # killed processes are still there
                if time.monotonic() > ends:
                    log.warning("the cgroup %s is left: %s", self.folder, error)
                    return
                time.sleep(_PAUSE_S)
            else:
                return
