"""A folder of checkpoints, each complete or absent.

A checkpoint is written into a hidden folder, made durable, and renamed: a name that exists is complete. Names carry the
incarnation, so a fenced learner cannot overwrite its successor's checkpoints. Rank 0 makes and renames folders; where
any rank fails, all fail together and nothing is left. The buffer, not the folder, knows which checkpoint is the latest
one; `learner.checkpoint.retention` decides which ones stay. The actor's state is at the folder's root, that of every
other trained role in a subfolder of its name. Models that are not trained have no part in it.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from functools import partial
from pathlib import Path

from rollmesh.learner.checkpoint.collective_write import on_every_rank
from rollmesh.learner.checkpoint.compatibility import check_roles
from rollmesh.learner.checkpoint.digests import check_digests, write_digests
from rollmesh.learner.checkpoint.names import checkpoint_name, list_checkpoints
from rollmesh.learner.engines.interface import ACTOR, Engine
from rollmesh.mesh.errors import ConfigError, DataError, FencedError
from rollmesh.mesh.files import fsync_path
from rollmesh.mesh.trajectory.versions import PolicyVersion

# Longest write of one role's state. The processes' own wait for one another is as long.
_WRITE_S = 1800.0


class DamagedCheckpointError(DataError):
    """Files of a checkpoint are missing, or hold other bytes than were written."""


class CheckpointStore:
    """Checkpoints of one run.

    Args:
        root: folder of the checkpoints; made when it is needed.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def check(self, actor: Engine) -> None:
        """Refuses a folder that is not one and the same for all ranks, or that one of them may not write; collective.

        Raises:
            ConfigError: names a rank and its host.
        """
        # A name that no node has asked for before, so that none has cached its absence.
        (name,) = filter(None, actor.world.gather_bytes(uuid.uuid4().hex.encode() if actor.layout.leads else b""))
        probe = self._root / f".probe-{name.decode()}"
        try:
            on_every_rank(actor, partial(_make, probe) if actor.layout.leads else _no_work)
            on_every_rank(actor, (probe / str(actor.layout.process)).touch)
        except OSError as error:
            raise ConfigError(
                f"cannot write checkpoints into {self._root}: {error}",
                hint="set run.dir to a folder that every rank may write, the same one on all nodes",
            ) from error
        finally:
            if actor.layout.leads:
                shutil.rmtree(probe, ignore_errors=True)

    def save(self, engines: Mapping[str, Engine], version: PolicyVersion, extra: dict[str, object]) -> Path:
        """Writes a checkpoint; collective. It is durable when this returns.

        Args:
            engines: by role name, in the same order on every rank; those that are trained are saved.
            version: names the checkpoint; an existing one of that name is kept as it is.
            extra: JSON that `load_checkpoint` gives back (data cursor and the like).

        Raises:
            DataError: the disk refuses, on whichever rank.
            FencedError: another learner has removed the written files: it has taken the run over.
        """
        final = self.path(version)
        unfinished = self._root / f".partial-{final.name}"
        actor = engines[ACTOR]
        leads = actor.layout.leads
        # Nodes may have cached different answers: rank 0's counts.
        if any(actor.world.gather_bytes(b"there" if leads and final.is_dir() else b"")):
            return final
        parts = list(_parts(engines, unfinished))
        stamp: dict[str, object] = {"incarnation": version.incarnation, "version": version.version}
        made = False
        try:
            on_every_rank(actor, partial(_make, *(folder for _, _, folder in parts)) if leads else _no_work)
            on_every_rank(actor, partial(os.stat, unfinished))
            made = True
            for role, engine, folder in parts:
                on_every_rank(actor, partial(_write, engine, folder, extra | stamp if role == ACTOR else stamp))
            write_digests(actor, unfinished)
            on_every_rank(actor, partial(_finish, unfinished, final) if leads else _no_work)
        except OSError as error:
            # Only a learner that takes the run over sweeps unfinished checkpoints.
            if made and self._root.is_dir() and not unfinished.exists():
                raise FencedError(
                    f"{final.name} was removed while it was written: another learner has taken this run over"
                ) from error
            if leads:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise DataError(f"cannot write checkpoint {final}: {error}", hint="free space, or set run.dir") from error
        return final

    def path(self, version: PolicyVersion) -> Path:
        """The folder of a version's checkpoint, written or not."""
        return self._root / checkpoint_name(version)

    def list(self) -> list[tuple[PolicyVersion, Path]]:
        """Complete checkpoints, by incarnation and version."""
        return list_checkpoints(self._root)


def load_checkpoint(engines: Mapping[str, Engine], folder: Path) -> dict[str, object]:
    """Restores every trained engine; collective. State of roles that are not among them is left alone.

    Args:
        engines: by role name, in the same order on every rank.
        folder: of a checkpoint.

    Returns:
        The `extra` of `CheckpointStore.save`, with `incarnation` and `version`.

    Raises:
        DamagedCheckpointError: a file is damaged; nothing has changed.
        DataError: no checkpoint, one of another model, or one without the state of a trained role, where nothing has
            changed either.
    """
    parts = list(_parts(engines, folder))
    check_roles(folder, (role for role, _, _ in parts if role != ACTOR))
    try:
        check_digests(engines[ACTOR], folder)
    except OSError as error:
        raise DamagedCheckpointError(
            f"cannot load checkpoint {folder}: {error}",
            hint="restore it from a copy, or start over with --fresh",
        ) from error
    loaded = {role: engine.load_checkpoint(part) for role, engine, part in parts}
    return loaded[ACTOR]


def _parts(engines: Mapping[str, Engine], folder: Path) -> Iterator[tuple[str, Engine, Path]]:
    """Role, engine and folder of everything that is trained, the actor first."""
    yield ACTOR, engines[ACTOR], folder
    for role, engine in engines.items():
        if engine.trained and role != ACTOR:
            yield role, engine, folder / role


def _no_work() -> None:
    """The part of a rank without work."""


def _make(*folders: Path) -> None:
    """Makes folders; first empties the first one."""
    shutil.rmtree(folders[0], ignore_errors=True)
    for folder in folders:
        folder.mkdir(parents=True)


def _write(engine: Engine, folder: Path, extra: dict[str, object]) -> None:
    written = engine.begin_checkpoint(folder, extra)
    wait([written], _WRITE_S)
    if not written.done():
        raise OSError(f"{folder} is not written after {_WRITE_S:.0f} s")
    written.result()


def _finish(unfinished: Path, final: Path) -> None:
    _sync_tree(unfinished)
    unfinished.rename(final)
    fsync_path(final.parent)


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        fsync_path(path)
    fsync_path(folder)
