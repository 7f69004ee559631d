"""Copies of checkpoints under a URL: in an object store, or wherever else fsspec can write.

Invariants: a copy that exists is complete. Object stores cannot rename a folder. So the list of digests, which names
all files of a checkpoint, is written last, and a copy without it is none. A copy is removed, its list first, only after
the newest checkpoint has one. With each goes the consumption log: a run is restored from the two.
"""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec

from rollmesh.learner.checkpoint.collective_write import Ranks
from rollmesh.learner.checkpoint.digests import DIGESTS_NAME, check_digests
from rollmesh.learner.checkpoint.names import checkpoint_name, list_checkpoints, version_of
from rollmesh.mesh.errors import ConfigError, DataError

_log = logging.getLogger(__name__)


class CopyError(DataError):
    """A copy could not be written or read."""


class RemoteCopies:
    """The copies of one run.

    Args:
        url: as `s3://bucket/runs/NAME`; what stands before `://` names fsspec's file system.

    Raises:
        ConfigError: there is no such file system, its package is not installed, or it does not answer.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        try:
            self._files, root = fsspec.core.url_to_fs(self._url)
        except Exception as error:  # every file system has errors of its own
            raise ConfigError(f"cannot copy to {self._url}: {error}", hint="see checkpoint.copy_to") from error
        self._root = str(root).rstrip("/")

    def check(self, checkpoints: Path) -> None:
        """Refuses a place that cannot be written, and one with copies of a run that has nothing here.

        Args:
            checkpoints: their folder.

        Raises:
            ConfigError: says why.
        """
        probe = f"{self._root}/.probe-{uuid.uuid4().hex}"
        try:
            with self._named("cannot write"):
                self._require_bucket()
                self._make(self._root)
                self._files.pipe_file(probe, b"probe")
                self._files.rm_file(probe)
                found = self._complete()
        except CopyError as error:
            raise ConfigError(error.message, hint="see checkpoint.copy_to, and the rights there") from error
        if found and not list_checkpoints(checkpoints):
            raise ConfigError(
                f"{self._url} has copies of a run that has no checkpoint in {checkpoints}",
                hint="`rollmesh fetch` brings that run back; for another run set another run.name",
            )

    def update(self, checkpoints: Path, log: Path) -> list[str]:
        """Copies what the run has and the URL lacks, the newest first; removes what only the URL has.

        A checkpoint that the run removes meanwhile is left out.

        Args:
            checkpoints: their folder.
            log: the consumption log.

        Returns:
            Names of the new copies.

        Raises:
            CopyError: something could not be copied, or the run has no checkpoint; copies that were complete still are.
        """
        with self._named("cannot write"):
            self._require_bucket()
            there, added = self._complete(), []
            here = {path.name: path for _, path in reversed(list_checkpoints(checkpoints))}
            if there and not here:
                # As where a disk is not mounted any more: then the copies are all there is.
                raise CopyError(f"{checkpoints} has no checkpoint: the copies in {self._url} stay")
            for name, folder in here.items():
                if self._add(folder, log, there.get(name)):
                    added.append(name)
            for name in there:
                if name not in here:
                    self._remove(name)
            return added

    def fetch(self, checkpoints: Path, log: Path) -> Path:
        """Brings the newest copy and its consumption log to where a run has them.

        Args:
            checkpoints: their folder; must not have any.
            log: the consumption log; must not exist.

        Returns:
            The checkpoint's folder.

        Raises:
            ConfigError: the run has begun already.
            CopyError: there is no copy, or a damaged one.
        """
        if list_checkpoints(checkpoints) or log.exists():
            raise ConfigError(
                f"{checkpoints.parent} has a run already", hint="choose another folder: nothing is overwritten"
            )
        with self._named("cannot read"):
            found = sorted((version, name) for name in self._complete() if (version := version_of(name)))
            if not found:
                raise CopyError(f"there is no copy of a checkpoint below {self._url}")
            version, name = found[-1]
            unfinished = checkpoints / f".partial-{name}"
            shutil.rmtree(unfinished, ignore_errors=True)
            source = f"{self._root}/{name}"
            for path in self._files.find(source):
                target = unfinished / path.removeprefix(f"{source}/")
                target.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(path, str(target))
            check_digests(Ranks(0, 1, lambda message: [message]), unfinished)
            if (unfinished / log.name).exists():
                (unfinished / log.name).rename(log)
        final = checkpoints / checkpoint_name(version)
        unfinished.rename(final)
        return final

    def _require_bucket(self) -> None:
        bucket = self._root.partition("/")[0]
        try:
            # Not `exists`, which is False for missing credentials too.
            _ = bucket and self._files.info(bucket)
        except FileNotFoundError:
            # To make its folder would make it, with rights that no one has chosen.
            raise CopyError(f"cannot write {self._url}: there is no bucket {bucket}") from None

    def _complete(self) -> dict[str, bytes]:
        """The complete copies by name, with their lists of digests."""
        self._files.invalidate_cache()
        found = {path.rsplit("/", 2)[1]: path for path in self._files.glob(f"{self._root}/*/{DIGESTS_NAME}")}
        return {name: self._files.cat_file(path) for name, path in found.items() if version_of(name) is not None}

    def _add(self, folder: Path, log: Path, there: bytes | None) -> bool:
        """Copies a checkpoint unless it is there; False where there is nothing to do."""
        out = f"{self._root}/{folder.name}"
        try:
            digests = (folder / DIGESTS_NAME).read_bytes()
            if digests == there:
                return False
            if there is not None:
                self._remove(folder.name)
            files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != DIGESTS_NAME]
            for path in files:
                self._put(path, f"{out}/{path.relative_to(folder)}")
            if log.exists():
                self._put(log, f"{out}/{log.name}")
            self._files.pipe_file(f"{out}/{DIGESTS_NAME}", digests)
        except FileNotFoundError:
            if folder.exists():
                raise
            if self._files.exists(out):
                self._files.rm(out, recursive=True)
            return False
        return True

    def _put(self, path: Path, out: str) -> None:
        self._make(out.rpartition("/")[0])
        self._files.put_file(str(path), out)

    def _make(self, folder: str) -> None:
        # Object stores have no folders: their file systems do nothing, or look for the bucket.
        self._files.makedirs(folder, exist_ok=True)

    def _remove(self, name: str) -> None:
        self._files.rm_file(f"{self._root}/{name}/{DIGESTS_NAME}")
        self._files.rm(f"{self._root}/{name}", recursive=True)

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except DataError:
            raise
        except Exception as error:  # every file system has errors of its own
            raise CopyError(f"{what} {self._url}: {type(error).__name__}: {error}") from error
