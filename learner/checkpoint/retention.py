"""Retention: removal of checkpoints that are not needed any more; rank 0's work alone.

Invariants: a checkpoint is removed only after a newer one was committed. The committed one, the best one and those of
versions that are being evaluated stay however old they are. So does the one that is being copied elsewhere, or a slow
store would never get a whole one. That is at most one more than `keep`, also where the store hangs. Each is renamed
before its removal, so that an interrupted removal leaves no incomplete checkpoint under a valid name. Half-written and
half-removed folders of an older incarnation are removed once it is fenced, which it is when its successor starts.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from pathlib import Path

from rollmesh.learner.checkpoint.best import protected_names
from rollmesh.learner.checkpoint.names import list_checkpoints
from rollmesh.mesh.files import write_atomically

log = logging.getLogger(__name__)
_SWEPT = ".swept-by"
_UNFINISHED = re.compile(r"^\.(?:partial|removed)-i(\d{4,})-v\d{8,}$")


def prune(root: Path, *, committed: str, keep: int, uploading: str | None = None) -> None:
    """Removes the oldest checkpoints; one that cannot be removed stays, with a warning.

    Args:
        root: folder of the checkpoints.
        committed: name of the one that the buffer names now.
        keep: how many of the newest stay, the best one and those being evaluated not counted.
        uploading: name of the one that is being copied elsewhere.

    Raises:
        DataError: the file about the best one cannot be read.
    """
    spared = protected_names(root) - {committed}
    # By name, which is by incarnation and version: a learner that was fenced may have written its last one later.
    others = [path for _, path in list_checkpoints(root) if path.name not in spared]
    for path in others[:-keep]:
        if path.name not in (committed, uploading):
            _remove(path)


def sweep(root: Path, incarnation: int) -> None:
    """Removes unfinished checkpoints of earlier learners, and leaves a note for those that still write.

    Args:
        root: folder of the checkpoints.
        incarnation: of this learner, which has taken the run over.
    """
    if not root.is_dir():
        return
    with contextlib.suppress(OSError):
        write_atomically(root / _SWEPT, str(incarnation))
    for path in sorted(root.iterdir()):
        match = _UNFINISHED.match(path.name)
        if match and int(match[1]) < incarnation:
            log.info("removing %s, which a learner before this one left unfinished", path)
            # At once: a learner that still writes there finds nothing, and knows that it has been taken over.
            doomed = path.with_name(path.name.replace(".partial-", ".removed-"))
            with contextlib.suppress(OSError):
                path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def swept_by(root: Path) -> int:
    """The incarnation of the last learner that has swept the folder; 0: none has."""
    try:
        return int((root / _SWEPT).read_bytes())
    except (OSError, ValueError):
        return 0


def _remove(path: Path) -> None:
    doomed = path.with_name(f".removed-{path.name}")
    try:
        path.rename(doomed)
    except OSError as error:
        log.warning("checkpoint %s cannot be removed: %s", path, error.strerror)
        return
    shutil.rmtree(doomed, ignore_errors=True)
