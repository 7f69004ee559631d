"""A folder of checkpoints, each complete or absent.

A checkpoint is written into a hidden folder, made durable, and renamed: a name that exists is complete. Names carry the
incarnation, so a fenced learner cannot overwrite what its successor wrote; what a learner that was killed left half
written or half removed goes when a later incarnation first saves. Which checkpoint is the latest one is the
buffer's to say, not the folder's. The actor's state is at the folder's root, that of every other trained role in a
subfolder of its name; models that are not trained have no part in it. The best checkpoint, and those of versions that
are being evaluated, stay however old they are (`learner.checkpoint.best`).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from learner.checkpoint.best import protected
from learner.checkpoint.names import CHECKPOINTS_NAME, listed, name_of
from learner.engines.base import Engine
from mesh.errors import DataError
from mesh.versions import PolicyVersion

__all__ = ["ACTOR", "CHECKPOINTS_NAME", "STATE_NAME", "CheckpointStore", "load_checkpoint"]

ACTOR = "actor"
STATE_NAME = "state.json"
"""What every engine writes into each, beside its tensors."""
_UNFINISHED = re.compile(r"^\.(?:partial|removed)-i(\d{4,})-v\d{8,}$")


class CheckpointStore:
    """Checkpoints of one run.

    Args:
        root: folder of the checkpoints; made on the first save.
        keep: how many of the newest stay, those not counted that stay anyway.
    """

    def __init__(self, root: Path, *, keep: int) -> None:
        self._root = root
        self._keep = keep
        self._tidied = False

    def save(self, engines: Mapping[str, Engine], version: PolicyVersion, extra: dict[str, object]) -> Path:
        """Writes a checkpoint and removes old ones; collective. It is durable when this returns.

        Args:
            engines: by role name, in the same order on every rank; those that are trained are saved.
            version: names the checkpoint; an existing one of that name is kept as it is.
            extra: JSON that `load_checkpoint` gives back (data cursor and the like).

        Raises:
            DataError: the disk refuses.
        """
        final = self.path(version)
        if final.is_dir():
            return final
        partial = self._root / f".partial-{final.name}"
        actor = engines[ACTOR]
        try:
            if actor.rank == 0:
                self._tidy(version.incarnation)
                shutil.rmtree(partial, ignore_errors=True)
                for _, _, folder in _parts(engines, partial):
                    folder.mkdir(parents=True, exist_ok=True)
            actor.barrier()
            stamp: dict[str, object] = {"incarnation": version.incarnation, "version": version.version}
            for role, engine, folder in _parts(engines, partial):
                engine.save_checkpoint(folder, extra | stamp if role == ACTOR else stamp)
            if actor.rank == 0:
                _sync_tree(partial)
                partial.rename(final)
                _sync(self._root)
                self._prune(newest=final)
            actor.barrier()
        except OSError as error:
            if actor.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise DataError(
                f"cannot write checkpoint {final}: {error.strerror or error}", hint="free space, or set run.dir"
            ) from error
        return final

    def path(self, version: PolicyVersion) -> Path:
        """Where the checkpoint of a version is or would be."""
        return self._root / name_of(version)

    def list(self) -> list[tuple[PolicyVersion, Path]]:
        """Complete checkpoints, by incarnation and version."""
        return listed(self._root)

    def _tidy(self, incarnation: int) -> None:
        """Removes what learners of older incarnations have left unfinished; once, since they are over."""
        if self._tidied or not self._root.is_dir():
            return
        for path in self._root.iterdir():
            match = _UNFINISHED.match(path.name)
            if match and int(match[1]) < incarnation:
                shutil.rmtree(path, ignore_errors=True)
        self._tidied = True

    def _prune(self, newest: Path) -> None:
        # A resumed learner may go on below a version that an older incarnation reached: age is the order of writing.
        kept = protected(self._root) | {newest.name}
        others = [path for _, path in self.list() if path.name not in kept]
        others.sort(key=lambda path: path.stat().st_mtime_ns)
        for path in others[: max(0, len(others) - self._keep + 1)]:
            # Renamed first, so that an interrupted removal leaves no incomplete checkpoint under a valid name.
            doomed = path.with_name(f".removed-{path.name}")
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def load_checkpoint(engines: Mapping[str, Engine], folder: Path) -> dict[str, object]:
    """Restores every trained engine; collective. State of roles that are not among them is left alone.

    Args:
        engines: by role name, in the same order on every rank.
        folder: of a checkpoint.

    Returns:
        The `extra` of `CheckpointStore.save`, with `incarnation` and `version`.

    Raises:
        DataError: no checkpoint, one of another model, or one without the state of a trained role; nothing has
            changed where a role is missing.
    """
    parts = list(_parts(engines, folder))
    missing = [role for role, _, part in parts if role != ACTOR and not part.is_dir()]
    if missing:
        raise DataError(
            f"checkpoint {folder} holds no state of {', '.join(missing)}",
            hint="resume with the algorithm that wrote it, or start a run under another name",
        )
    loaded = {role: engine.load_checkpoint(part) for role, engine, part in parts}
    return loaded[ACTOR]


def _parts(engines: Mapping[str, Engine], folder: Path) -> Iterator[tuple[str, Engine, Path]]:
    """Role, engine and folder of everything that is trained, the actor first."""
    yield ACTOR, engines[ACTOR], folder
    for role, engine in engines.items():
        if engine.trained and role != ACTOR:
            yield role, engine, folder / role


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
