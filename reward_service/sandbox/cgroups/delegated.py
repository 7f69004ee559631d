"""The folder that this service may divide: found, and made ready."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rollmesh.reward_service.sandbox.cgroups.cgroup import Cgroup
from rollmesh.reward_service.sandbox.cgroups.decisions import (
    CONTROLLERS,
    LEAF,
    divisible,
    is_delegated,
    own_folder,
)

_PREFIX = "rollmesh-sandbox-"
# systemd's marks; the first can be read by every account.
_MARKS = ("user.delegate", "trusted.delegate")
# Processes may come while others are moved.
_ROUNDS = 20
_numbers = itertools.count()


class MissingError(Exception):
    """No folder can be divided here; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Delegated:
    """A folder that this service divides.

    Attributes:
        folder: its path.
        controllers: those of `CONTROLLERS` that its parts have.
    """

    folder: Path
    controllers: frozenset[str]

    @classmethod
    def find(cls) -> Delegated:
        """The folder that was left to this service, made ready.

        Its processes, this one among them, move to a leaf: the kernel divides no folder that has some.

        Raises:
            MissingError: none was.
        """
        found = own_folder(_text("/proc/self/cgroup"), _text("/proc/self/mountinfo"))
        if found is None:
            raise MissingError("cgroup v2 is not mounted")
        own, highest = found
        folder = divisible(own, highest, marked=_is_marked)
        try:
            owner = folder.stat().st_uid
            if not is_delegated(folder, highest, marked=_is_marked(folder), owner=owner, account=os.geteuid()):
                raise MissingError(f"{folder} is not delegated to this service")
            return cls.at(folder)
        except OSError as error:
            raise MissingError(f"{folder} cannot be divided: {error}") from error

    @classmethod
    def at(cls, folder: Path) -> Delegated:
        """A folder, made ready.

        Raises:
            MissingError: it has no controller.
            OSError: it cannot be divided.
        """
        there = frozenset(CONTROLLERS) & _words(folder / "cgroup.controllers")
        if not there:
            raise MissingError(f"{folder} has no controller {' or '.join(CONTROLLERS)}")
        divided = cls(folder, there)
        divided._remove_left()
        divided.divide().end()  # shows what cannot be done
        if wanted := there - _words(folder / "cgroup.subtree_control"):
            if (folder / "cgroup.type").exists():  # the root, which has none, may keep processes
                _empty(folder)
            (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in sorted(wanted)))
        return divided

    def divide(self) -> Cgroup:
        """A new part.

        Raises:
            OSError: it cannot be made, or not be ended at once.
        """
        folder = self.folder / f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        folder.mkdir()
        group = Cgroup(folder, self.controllers)
        if not group.can_be_killed():
            group.end()
            raise OSError("it needs Linux 5.14")
        return group

    def describe(self) -> str:
        """A text for people about the bounds."""
        lacking = [name for name in CONTROLLERS if name not in self.controllers]
        what = " and ".join(_BOUNDED[name] for name in CONTROLLERS if name in self.controllers)
        return f"a cgroup bounds {what}" + "".join(
            f", but not {_BOUNDED[name]} (no controller {name})" for name in lacking
        )

    def _remove_left(self) -> None:
        """Ends the parts of services that were killed."""
        for group in self._left():
            group.end()

    def _left(self) -> Iterator[Cgroup]:
        for folder in self.folder.glob(f"{_PREFIX}*-*"):
            pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
            if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
                yield Cgroup(folder, self.controllers)


_BOUNDED = {"memory": "memory", "pids": "processes"}


def _empty(folder: Path) -> None:
    """Moves all processes of a folder to its leaf.

    Raises:
        OSError: some stay.
    """
    leaf = folder / LEAF
    leaf.mkdir(exist_ok=True)
    for _ in range(_ROUNDS):
        there = _words(folder / "cgroup.procs")
        if not there:
            return
        for pid in there:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                (leaf / "cgroup.procs").write_text(pid)
    raise OSError(f"processes come faster than they move to {leaf}")


def _is_marked(folder: Path) -> bool:
    for mark in _MARKS:
        with contextlib.suppress(OSError):
            if os.getxattr(folder, mark) == b"1":
                return True
    return False


def _text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def _words(path: Path) -> frozenset[str]:
    return frozenset(path.read_text(encoding="ascii").split())
