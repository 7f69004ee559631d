"""The Unix socket of the embedded Redis, in a folder that only its user can open, and the file by which fronts find it.

Invariants: no other user can connect, or put a socket in its place. A server that is started again on the same folder
has the same address, so that further fronts continue there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import stat
import tempfile
from pathlib import Path
from urllib.parse import quote

from rollmesh.mesh.errors import StoreError

# In the server's folder: the URL of its socket.
NOTE = "url"
_NAME = "redis.sock"
# Anyone may make folders there: the owner and the mode of ours are checked.
_SHARED = "/tmp"  # noqa: S108


def socket_url(path: Path, login: str = "") -> str:
    """The URL of a socket; `login` is empty or `user:password`."""
    return f"unix://{login}{'@' if login else ''}{quote(str(path))}?db=0"


def place_socket(folder: Path) -> Path:
    """Chooses where the server of a folder listens: in it, or in a short private folder if it can hold no socket.

    That is so where the path is longer than the system allows (108 bytes), and on some network file systems.

    Args:
        folder: the server's, which is its user's alone, and which no other server uses.

    Raises:
        OSError: the address cannot be noted.
        StoreError: there is no place for a socket.
    """
    path = folder.resolve() / _NAME
    if not _can_bind(path):
        path = _elsewhere(folder.resolve())
    (folder / NOTE).write_text(socket_url(path), encoding="utf-8")
    return path


def remove_socket(path: Path, folder: Path) -> None:
    """Removes the socket of an ended server outside of its folder, for which the caller holds the folder's lock."""
    if path.parent != folder.resolve():
        path.unlink(missing_ok=True)
        path.parent.rmdir()


def _can_bind(path: Path) -> bool:
    """True if a socket can lie there; one that does belongs to a dead server."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            path.unlink(missing_ok=True)
            probe.bind(str(path))
            path.unlink()
        except OSError:
            return False
        return True


def _elsewhere(folder: Path) -> Path:
    """The same for a folder at every start, and another one for a copy of it.

    Not in `$XDG_RUNTIME_DIR`: that ends with its user's last session, which runs outlive.
    """
    name = f"rollmesh-{os.getuid()}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}"
    for place in dict.fromkeys((tempfile.gettempdir(), _SHARED)):
        private = Path(place) / name
        if _make_private(private):
            if _can_bind(private / _NAME):
                return private / _NAME
            with contextlib.suppress(OSError):
                private.rmdir()
    raise StoreError(
        f"redis-server has no place for its socket: neither {folder} nor a private folder in {place} can hold it",
        hint="set run.dir, or TMPDIR, to a folder with a short path on a local disk",
    )


def _make_private(folder: Path) -> bool:
    """Makes the folder, or checks the one that is there: in a folder that all may write to, it may be anyone's."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError:
        return False
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
