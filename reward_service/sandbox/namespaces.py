"""Rung 3's world: namespaces of its own, with a small read-only tree of files and no network.

Sources: user_namespaces(7), mount_namespaces(7), pivot_root(2).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rollmesh.reward_service.sandbox import linux

# The account that a program sees itself as: no root, so that executing a file gives it nothing.
_INSIDE = 1000
_DEVICES = ("null", "zero", "full", "random", "urandom")
_FLAGS = (
    linux.CLONE_NEWUSER
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWNET
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWCGROUP
)
_OLD = "/old"


def enter() -> None:
    """Moves this process to new namespaces; its next child is the first process of the one of processes.

    Raises:
        OSError: this host forbids it.
    """
    uid, gid = os.geteuid(), os.getegid()
    linux.unshare(_FLAGS)
    Path("/proc/self/setgroups").write_text("deny", encoding="ascii")
    Path("/proc/self/uid_map").write_text(f"{_INSIDE} {uid} 1", encoding="ascii")
    Path("/proc/self/gid_map").write_text(f"{_INSIDE} {gid} 1", encoding="ascii")


def build_root(at: str, readable: Sequence[str], folder: str) -> None:
    """Makes a root with nothing but `readable` paths, a few devices and an empty `folder`, and moves there.

    Args:
        at: an existing folder, which is hidden by the new root.
        readable: absolute paths, none of them below another.
        folder: absolute path, where `give_folder` puts a folder for each job.

    Raises:
        OSError: this host forbids it.
    """
    # The stub keeps the host's tree, in which it removes the folder.
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount(None, "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", at, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,nr_inodes=4096,mode=755")
    for path in readable:
        _show(path, at + path)
    os.makedirs(f"{at}/dev")
    for name in _DEVICES:
        Path(f"{at}/dev/{name}").touch()
        linux.mount(f"/dev/{name}", f"{at}/dev/{name}", None, linux.MS_BIND)
    os.makedirs(at + folder)
    os.mkdir(at + _OLD)
    linux.pivot_root(at, at + _OLD)
    os.chdir("/")
    linux.unmount(_OLD)
    os.rmdir(_OLD)
    linux.mount(None, "/", None, linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV)
    linux.set_host_name(b"sandbox")


def give_folder(folder: str, size: int) -> None:
    """Mounts an empty file system of at most `size` bytes at `folder`."""
    options = f"size={size},nr_inodes=4096,mode=700"
    linux.mount("tmpfs", folder, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)


def _show(path: str, at: str) -> None:
    os.makedirs(os.path.dirname(at), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), at)
        return
    if os.path.isdir(path):
        os.makedirs(at, exist_ok=True)
    else:
        Path(at).touch()
    linux.mount(path, at, None, linux.MS_BIND | linux.MS_REC)
    linux.make_read_only(at)
