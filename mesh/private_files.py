"""Folders and files that only their user may read: runs, with all samples, and secrets.

Invariants: a user who cannot enter a folder can neither read its contents nor connect to its sockets. An existing
folder keeps its mode, since its owner may share it on purpose; a caller that needs it private asks for that. A file
that holds a secret is used only if no other user may read or change it. It is the user's own or root's, and closed to
the others.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rollmesh.mesh.errors import ConfigError

_ROOT = 0
_OTHERS = 0o077
# A file of root's may be read by a group that root chose, as certificates of services often are.
_OTHERS_OF_ROOT = 0o037
# Files that a container is given: no one but its own processes can reach them, whatever their mode says.
_CONTAINER_SECRETS = ("/run/secrets", "/var/run/secrets")
_IS_IT_THERE = "give the path of an existing file"


def private_folder(path: Path) -> None:
    """Makes the folder, with its parents, for its user alone.

    Raises:
        OSError: it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def write_new(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Writes a file that is not there yet; it has its mode from the first moment, whatever the umask.

    Raises:
        FileExistsError: it is there.
        OSError: the disk refuses.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(content)


def restrict_to_owner(path: Path) -> None:
    """Takes every right on a folder or file from all but its owner.

    Raises:
        OSError: it is not ours, or is not there.
    """
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & _OTHERS:
        path.chmod(mode & ~_OTHERS)


def is_open_to_others(path: Path) -> bool:
    """True if another user may read a folder, or enter it."""
    return bool(path.stat().st_mode & _OTHERS)


def keep_private() -> None:
    """Makes all files of this process and its children private to their user, and so the code that they load.

    Torch keeps what it compiles, and loads it again, in a folder of /tmp. Any user can predict its name and make it
    first.
    """
    os.umask(_OTHERS)
    home = os.path.expanduser("~")
    # Made when it is needed. Users of a container may have no home, and its /tmp for themselves.
    if os.access(home, os.W_OK):
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path(home, ".cache"))
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(caches / "rollmesh" / "inductor"))


def check_closed(path: Path, key: str, *, how: str = _IS_IT_THERE) -> None:
    """Refuses a file with a secret that another user chose, or to which other users of the host have rights.

    Root may use everyone's, as commands on a run folder do.

    Args:
        key: the configuration key that names the file, for errors.
        how: hint for a user without such a file.

    Raises:
        ConfigError: it is another user's, or they have; or there is no such file.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"{key} {path}: {error.strerror}", hint=how) from error
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{key} {path} is not a file", hint=how)
    if any(map(path.is_relative_to, _CONTAINER_SECRETS)):
        return
    user = os.geteuid()
    if user != _ROOT and status.st_uid not in (user, _ROOT):
        raise ConfigError(f"{key} {path} belongs to another user, who may change it", hint="use a copy of your own")
    rights = status.st_mode & (_OTHERS_OF_ROOT if status.st_uid == _ROOT else _OTHERS)
    if rights:
        raise ConfigError(f"{key} {path}: other users of this host may read or change it", hint=f"chmod 600 {path}")


def read_secret(path: Path, key: str, *, how: str = "") -> str:
    """The secret in a file, without the white space around it.

    Args:
        key: the configuration key that names the file, for errors.
        how: such a file is made; empty: by hand.

    Raises:
        ConfigError: it cannot be read, is empty, or is not closed to other users.
    """
    how = how or f"(umask 077; cat > {path}) writes a file that is closed to other users"
    check_closed(path, key, how=how)
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key} {path}: {getattr(error, 'strerror', None) or error}") from error
    if not text:
        raise ConfigError(f"{key} {path} is empty", hint=how)
    return text
