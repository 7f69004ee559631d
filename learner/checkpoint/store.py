"""A folder of checkpoints, each complete or absent.

A checkpoint is written into a hidden folder, made durable, and renamed: a name that exists is complete. Names carry the
incarnation, so a fenced learner cannot overwrite what its successor wrote; which checkpoint is the latest one is the
buffer's to say, not the folder's.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from learner.engines.base import Engine
from mesh.errors import DataError
from mesh.versions import PolicyVersion

_NAME = re.compile(r"^i(\d{4,})-v(\d{8,})$")


class CheckpointStore:
    """Checkpoints of one run.

    Args:
        root: folder of the checkpoints; made on the first save.
        keep: how many of the newest stay.
    """

    def __init__(self, root: Path, *, keep: int) -> None:
        self._root = root
        self._keep = keep

    def save(self, engine: Engine, version: PolicyVersion, extra: dict[str, object]) -> Path:
        """Writes a checkpoint and removes old ones; collective. It is durable when this returns.

        Args:
            engine: whose state to save.
            version: names the checkpoint; an existing one of that name is kept as it is.
            extra: JSON that `Engine.load_checkpoint` gives back (data cursor and the like).

        Raises:
            DataError: the disk refuses.
        """
        final = self.path(version)
        if final.is_dir():
            return final
        partial = self._root / f".partial-{final.name}"
        try:
            if engine.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
            engine.barrier()
            engine.save_checkpoint(partial, extra | {"incarnation": version.incarnation, "version": version.version})
            if engine.rank == 0:
                _sync_tree(partial)
                partial.rename(final)
                _sync(self._root)
                self._prune(newest=final)
            engine.barrier()
        except OSError as error:
            raise DataError(
                f"cannot write checkpoint {final}: {error.strerror or error}", hint="free space, or set run.dir"
            ) from error
        return final

    def path(self, version: PolicyVersion) -> Path:
        """Where the checkpoint of a version is or would be."""
        return self._root / f"i{version.incarnation:04d}-v{version.version:08d}"

    def list(self) -> list[tuple[PolicyVersion, Path]]:
        """Complete checkpoints, by incarnation and version."""
        if not self._root.is_dir():
            return []
        found = []
        for path in self._root.iterdir():
            match = _NAME.match(path.name)
            if match and path.is_dir():
                found.append((PolicyVersion(int(match[1]), int(match[2])), path))
        return sorted(found)

    def _prune(self, newest: Path) -> None:
        # A resumed learner may go on below a version that an older incarnation reached: age is the order of writing.
        others = sorted((path for _, path in self.list() if path != newest), key=lambda path: path.stat().st_mtime_ns)
        for path in others[: max(0, len(others) - self._keep + 1)]:
            # Renamed first, so that an interrupted removal leaves no incomplete checkpoint under a valid name.
            doomed = path.with_name(f".removed-{path.name}")
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
