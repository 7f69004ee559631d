"""A folder of checkpoints, each complete or absent.

A checkpoint is written into a hidden folder, made durable, and renamed: a name that exists is complete. Names carry the
incarnation, so a fenced learner cannot overwrite its successor's checkpoints. Rank 0 makes and renames folders; where
any rank fails, all fail together and nothing is left. The buffer, not the folder, knows which checkpoint is the latest
one; `learner.checkpoint.retention` decides which ones stay. The actor's state is at the folder's root, that of every
other trained role in a subfolder of its name. Models that are not trained have no part in it.

The thread that trains makes the folder, and has the engines copy their state. Another thread of every rank does the
rest: it waits for the engines' files, and takes their digests. One checkpoint is written at a time.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from rollmesh.learner.checkpoint.collective_write import Ranks
from rollmesh.learner.checkpoint.compatibility import check_roles
from rollmesh.learner.checkpoint.deadlines import WRITE_S
from rollmesh.learner.checkpoint.digests import check_digests, write_digests
from rollmesh.learner.checkpoint.names import checkpoint_name, list_checkpoints, version_of
from rollmesh.learner.checkpoint.retention import swept_by
from rollmesh.learner.engines.interface import ACTOR, Engine
from rollmesh.mesh.errors import ConfigError, DataError, FencedError
from rollmesh.mesh.files import fsync_path
from rollmesh.mesh.trajectory.versions import PolicyVersion


class Checkpointed(Protocol):
    """A model with a part in checkpoints, where it is trained: an engine's, or one that other processes hold."""

    @property
    def trained(self) -> bool:
        """It has a part."""
        ...

    def begin_checkpoint(self, folder: Path, extra: dict[str, object]) -> Future[None]:
        """See `Engine.begin_checkpoint`."""
        ...

    def load_checkpoint(self, folder: Path) -> dict[str, object]:
        """See `Engine.load_checkpoint`."""
        ...


class DamagedCheckpointError(DataError):
    """Files of a checkpoint are missing, or hold other bytes than were written."""


class UnwrittenCheckpointError(DataError):
    """A checkpoint that a disk has refused; none of its files is left."""


class CheckpointStore:
    """Checkpoints of one run.

    Args:
        root: folder of the checkpoints; made when it is needed.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._apart: Ranks | None = None
        self._parts: list[Future[None]] = []
        self._writing: Future[Path] = _known(root)

    def check(self, actor: Engine) -> None:
        """Refuses a folder that is not one and the same for all ranks, or that one of them may not write; collective.

        Raises:
            ConfigError: names a rank and its host.
        """
        ranks, _ = Ranks.of(actor), self._ranks_apart(actor)
        # A name that no node has asked for before, so that none has cached its absence.
        (name,) = filter(None, ranks.gather_bytes(uuid.uuid4().hex.encode() if ranks.leads else b""))
        probe = self._root / f".probe-{name.decode()}"
        try:
            ranks.on_leader(partial(_make, probe))
            ranks.on_every_rank((probe / str(ranks.process)).touch)
        except OSError as error:
            raise ConfigError(
                f"cannot write checkpoints into {self._root}: {error}",
                hint="set run.dir to a folder that every rank may write, the same one on all nodes",
            ) from error
        finally:
            if ranks.leads:
                shutil.rmtree(probe, ignore_errors=True)

    def begin(
        self,
        engines: Mapping[str, Engine],
        version: PolicyVersion,
        extra: dict[str, object],
        elsewhere: Mapping[str, Checkpointed] = MappingProxyType({}),
    ) -> Future[Path]:
        """Has a checkpoint written; collective. The state is copied when this returns: training may continue.

        Waits for the checkpoint before, where that is still being written.

        Args:
            engines: by role name, in the same order on every rank; those that are trained are saved.
            version: names the checkpoint; an existing one of that name is kept as it is.
            extra: JSON that `load_checkpoint` gives back (data cursor and the like).
            elsewhere: further roles, whose models other processes hold.

        Returns:
            The folder, once it is durable. It may fail with an `UnwrittenCheckpointError`: a disk refuses, on whichever
            rank. On rank 0 it may fail with a `FencedError`: another learner has removed the files, for it has taken
            the run over. A rank with an error that is not the disk's fails with that one.
        """
        wait([self._writing], WRITE_S)
        final = self.path(version)
        unfinished = self._root / f".partial-{final.name}"
        ranks = Ranks.of(engines[ACTOR])
        # Nodes may have cached different answers: rank 0's counts.
        if any(ranks.gather_bytes(b"there" if ranks.leads and final.is_dir() else b"")):
            return _known(final)
        apart = self._ranks_apart(engines[ACTOR])
        roles = list(_roles(engines, elsewhere, unfinished))
        stamp: dict[str, object] = {"incarnation": version.incarnation, "version": version.version}
        try:
            ranks.on_every_rank(self._check_idle)
            ranks.on_leader(partial(_make, *(folder for _, _, folder in roles)))
            ranks.on_every_rank(partial(os.stat, unfinished))
        except OSError as error:
            _remove_unfinished(ranks, unfinished)
            return _known(_unwritten(final, error))
        self._parts = parts = []
        try:
            for role, engine, folder in roles:
                parts.append(engine.begin_checkpoint(folder, extra | stamp if role == ACTOR else stamp))
        except BaseException:
            # Roles that have begun may still be writing, and files would come back.
            wait(parts, WRITE_S)
            _remove_unfinished(ranks, unfinished)
            raise
        self._writing = self._thread.submit(_finish, apart, self._parts, unfinished, final)
        return self._writing

    def path(self, version: PolicyVersion) -> Path:
        """The folder of a version's checkpoint, written or not."""
        return self._root / checkpoint_name(version)

    def list(self) -> list[tuple[PolicyVersion, Path]]:
        """Complete checkpoints, by incarnation and version."""
        return list_checkpoints(self._root)

    def close(self) -> None:
        """Waits for the checkpoint that is being written; to be called before its engines are closed."""
        wait([self._writing], WRITE_S)
        self._thread.shutdown(wait=False)

    def _ranks_apart(self, actor: Engine) -> Ranks:
        self._apart = self._apart or Ranks.apart(actor)
        return self._apart

    def _check_idle(self) -> None:
        if not all(part.done() for part in self._parts):
            raise OSError("the disk still writes the last one")


def load_checkpoint(
    engines: Mapping[str, Engine], folder: Path, elsewhere: Mapping[str, Checkpointed] = MappingProxyType({})
) -> dict[str, object]:
    """Restores every trained engine; collective. State of roles that are not among them is left alone.

    Args:
        engines: by role name, in the same order on every rank.
        folder: of a checkpoint.
        elsewhere: further roles, whose models other processes hold.

    Returns:
        The `extra` of `CheckpointStore.begin`, with `incarnation` and `version`.

    Raises:
        DamagedCheckpointError: a file is damaged; nothing has changed.
        DataError: no checkpoint, one of another model, or one without the state of a trained role, where nothing has
            changed either.
    """
    roles = list(_roles(engines, elsewhere, folder))
    check_roles(folder, (role for role, _, _ in roles if role != ACTOR))
    try:
        check_digests(Ranks.of(engines[ACTOR]), folder)
    except OSError as error:
        raise DamagedCheckpointError(
            f"cannot load checkpoint {folder}: {error}",
            hint="restore it from a copy, or start over with --fresh",
        ) from error
    loaded = {role: engine.load_checkpoint(part) for role, engine, part in roles}
    return loaded[ACTOR]


def _roles(
    engines: Mapping[str, Engine], elsewhere: Mapping[str, Checkpointed], folder: Path
) -> Iterator[tuple[str, Checkpointed, Path]]:
    """Role, model and folder of everything that is trained, the actor first."""
    yield ACTOR, engines[ACTOR], folder
    for role, model in (*engines.items(), *elsewhere.items()):
        if model.trained and role != ACTOR:
            yield role, model, folder / role


def _make(*folders: Path) -> None:
    """Makes folders; first empties the first one."""
    shutil.rmtree(folders[0], ignore_errors=True)
    for folder in folders:
        folder.mkdir(parents=True)


def _finish(ranks: Ranks, parts: Sequence[Future[None]], unfinished: Path, final: Path) -> Path:
    """Makes a checkpoint of the files that the engines write; collective, in a thread of its own."""
    try:
        for part in parts:
            ranks.on_every_rank(partial(_await, part, unfinished))
        write_digests(ranks, unfinished)
        ranks.on_leader(partial(_rename, unfinished, final))
    except Exception as error:
        # No collective here: a rank with an error of its own learns of it elsewhere than the others.
        # A cleaner of old files removes folders too: the learner that has swept this one has left a note.
        written_by = version_of(final.name)
        if ranks.leads and written_by is not None and swept_by(final.parent) > written_by.incarnation:
            raise FencedError(
                f"{final.name} was removed while it was written: another learner has taken this run over"
            ) from error
        # Another role's engine may still be writing, and files would come back.
        wait(parts, WRITE_S)
        _remove_unfinished(ranks, unfinished)
        if isinstance(error, OSError):
            raise _unwritten(final, error) from error
        raise
    return final


def _await(part: Future[None], folder: Path) -> None:
    wait([part], WRITE_S)
    if not part.done():
        raise OSError(f"{folder} is not written after {WRITE_S:.0f} s")
    part.result()


def _rename(unfinished: Path, final: Path) -> None:
    _sync_tree(unfinished)
    unfinished.rename(final)
    try:
        fsync_path(final.parent)
    except OSError:
        # It may be lost with the machine, so the next learner must not find it without that.
        final.rename(unfinished)
        raise


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        fsync_path(path)
    fsync_path(folder)


def _remove_unfinished(ranks: Ranks, unfinished: Path) -> None:
    if ranks.leads:
        shutil.rmtree(unfinished, ignore_errors=True)


def _known(outcome: Path | UnwrittenCheckpointError) -> Future[Path]:
    future: Future[Path] = Future()
    if isinstance(outcome, Path):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)
    return future


def _unwritten(final: Path, error: OSError) -> UnwrittenCheckpointError:
    return UnwrittenCheckpointError(
        f"cannot write checkpoint {final}: {error}", hint="see to the disk of run.dir: its space, or set another one"
    )
