"""The folder of cgroup v2 that may be divided, and the bounds of a sandbox in it. Pure.

Sources: Documentation/admin-guide/cgroup-v2.rst of Linux; systemd.resource-control(5), `Delegate=`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rollmesh.reward_service.sandbox.interface import Limits

CONTROLLERS = ("memory", "pids")
"""Controllers that bound something here, in order."""
LEAF = "rollmesh"
"""Folder for the processes of a folder that is divided: it may not keep any itself."""
# Bytes and tasks of a sandbox's own: the stub, the keeper and the zygote with what they have loaded, and a successor.
_OWN_MEMORY, _OWN_TASKS = 128 << 20, 8
# The keeper holds output and files several times while it passes them on.
_COPIES = 4
# Units of systemd for a user's session: all in them is that user's, and managed by another systemd.
_SESSIONS = "user@"


def own_folder(membership: str, mounts: str) -> tuple[Path, Path] | None:
    """This process' folder, and the highest that can be seen; none where no cgroup v2 is mounted for it.

    Args:
        membership: contents of /proc/self/cgroup.
        mounts: contents of /proc/self/mountinfo.
    """
    own = next((Path(row[3:]) for row in membership.splitlines() if row.startswith("0::")), None)
    if own is None or ".." in own.parts:
        return None
    for row in mounts.splitlines():
        before, _, after = row.partition(" - ")
        root, point = before.split()[3:5]
        if after.split()[0] == "cgroup2" and own.is_relative_to(root):
            return Path(point) / own.relative_to(root), Path(point)
    return None


def divisible(own: Path, highest: Path, *, marked: Callable[[Path], bool]) -> Path:
    """The folder to divide: the process' own, or the one above if it is in a leaf already.

    Args:
        own: the process' folder.
        highest: as of `own_folder`.
        marked: says whether systemd has marked a folder as delegated.
    """
    if own != highest and not marked(own) and (own.name == LEAF or marked(own.parent)):
        return own.parent
    return own


def is_delegated(folder: Path, highest: Path, *, marked: bool, owner: int, account: int) -> bool:
    """True if a folder was left to this account, rather than only within its power.

    Args:
        folder: the one to divide.
        highest: as of `own_folder`. A service that begins there, as in a container, has no manager above.
        marked: by systemd.
        owner: account that owns it.
        account: of this process.
    """
    given = account != 0 and owner == account and not any(part.startswith(_SESSIONS) for part in folder.parts)
    return marked or folder == highest or given


def bounds(limits: Limits, content: int, controllers: frozenset[str]) -> dict[str, int]:
    """Values of a sandbox's files, for a job.

    Args:
        limits: of the job; `memory` holds for all its processes together.
        content: bytes of its files and of its input.
        controllers: that the sandbox has.
    """
    found = {}
    if "memory" in controllers:
        copied = _COPIES * (limits.output + content)
        found = {"memory.max": limits.memory + limits.disk + copied + _OWN_MEMORY, "memory.swap.max": 0}
    if "pids" in controllers:
        found["pids.max"] = limits.processes + limits.threads + _OWN_TASKS
    return found


def kills(events: str) -> int:
    """Processes that were killed over the bound of memory, from the contents of `memory.events`."""
    return next((int(row.split()[1]) for row in events.splitlines() if row.startswith("oom_kill ")), 0)
