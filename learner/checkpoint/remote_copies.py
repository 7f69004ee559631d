"""Copies of checkpoints under a URL: in an object store, or wherever else fsspec can write.

Invariants: a copy that exists is complete. Object stores cannot rename a folder. So the list of digests, which names
all files of a checkpoint, is written last, and a copy without it does not count. Neither does one whose list is not
whole: other than object stores, folders show a file while it is written. A copy is removed, its list first, only while
a newer one is complete, or to be replaced by another checkpoint of its name. The best one stays until the next best
one has a copy. Nothing is removed that is newer than the run's newest checkpoint: a successor has written it. With
each copy goes the consumption log: a run is restored from the two. Next to the copies is the file about the best
checkpoint.
"""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import fsspec

from rollmesh.learner.checkpoint.best import FILE as BEST_NAME
from rollmesh.learner.checkpoint.best import Best, best_checkpoint, parse_best, restore_best
from rollmesh.learner.checkpoint.collective_write import Ranks
from rollmesh.learner.checkpoint.digests import DIGESTS_NAME, check_digests
from rollmesh.learner.checkpoint.names import list_checkpoints, version_of
from rollmesh.mesh.errors import ConfigError, DataError, RollmeshError
from rollmesh.mesh.trajectory.versions import PolicyVersion

log = logging.getLogger(__name__)
# Below every version.
_NONE = PolicyVersion(0, 0)


class CopyError(DataError):
    """A copy could not be written or read."""


class RemovedMeanwhileError(CopyError):
    """The newest checkpoint was removed while it was copied."""


def check_file_system(url: str) -> None:
    """Checks that there is a file system for a URL; asks no store.

    Args:
        url: as `checkpoint.copy_to`.

    Raises:
        ConfigError: there is none, or its package is not installed.
    """
    for part in url.split("::"):
        try:
            fsspec.get_filesystem_class(fsspec.core.split_protocol(part)[0] or part)
        except (ValueError, ImportError) as error:
            raise ConfigError(f"cannot copy to {url}: {error}", hint="see checkpoint.copy_to") from error


class RemoteCopies:
    """The copies of one run.

    Args:
        url: as `s3://bucket/runs/NAME`; what stands before `://` names fsspec's file system.

    Attributes:
        uploading: name of the checkpoint that is being copied; None: none is.

    Raises:
        ConfigError: there is no such file system, its package is not installed, or it does not answer.
    """

    def __init__(self, url: str) -> None:
        self.uploading: str | None = None
        self._url = url.rstrip("/")
        try:
            self._files, root = fsspec.core.url_to_fs(self._url)
        except Exception as error:  # every file system has errors of its own
            raise ConfigError(f"cannot copy to {self._url}: {error}", hint="see checkpoint.copy_to") from error
        self._root = str(root).rstrip("/")

    @property
    def url(self) -> str:
        """The place of the copies, as given."""
        return self._url

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
            hint = error.hint or "see checkpoint.copy_to, and the rights there"
            raise ConfigError(error.message, hint=hint) from error
        if found and not list_checkpoints(checkpoints):
            raise ConfigError(
                f"{self._url} has copies of a run that has no checkpoint in {checkpoints}",
                hint="`rollmesh fetch` brings that run back; for another run set another run.name",
            )

    def copy_next(self, checkpoints: Path, log: Path) -> str | None:
        """Copies a checkpoint that the URL lacks; then removes copies that are not needed there any more.

        The newest comes first. The best one comes before it once a newer one was copied before the best one. Otherwise
        a store that is slower than checkpoints would never have the best one. Not needed are copies of checkpoints that
        the run has removed, and uploads that broke off.

        Args:
            checkpoints: their folder; one thread of one learner at a time calls this for it.
            log: the consumption log.

        Returns:
            The name of the new copy; None: nothing was lacking.

        Raises:
            RemovedMeanwhileError: the newest one was removed meanwhile.
            CopyError: something could not be copied, or the run has lost all checkpoints. Complete copies stay.
        """
        with self._named("cannot write"):
            self._require_bucket()
            while True:
                here, there = _digests_by_name(checkpoints), self._complete()
                if there and not here:
                    # As where a disk is not mounted any more: then the copies are all there is.
                    raise CopyError(f"{checkpoints} has no checkpoint: the copies in {self._url} stay")
                lacking = [name for name, digests in here.items() if there.get(name) != digests]
                best = _best_of(checkpoints)
                passed_over = best in lacking and any(_version(copy) > _version(best) for copy in there)
                name = best if passed_over else next(iter(lacking), None)
                if name is None or self._add(checkpoints / name, log, here[name], replace=name in there):
                    break
                if name == next(iter(here)):
                    raise RemovedMeanwhileError(f"{name} was removed while it was copied to {self._url}")
            if here:
                self._copy_best(checkpoints / BEST_NAME, here)
                self._remove_needless(checkpoints)
            return name

    def fetch(self, checkpoints: Path, log: Path) -> Path:
        """Brings the newest copy and its consumption log to where a run has them, and the best one.

        After an interruption it can be repeated. The newest checkpoint gets its name after the log, then the best one
        does, and the file about the best one comes last.

        Args:
            checkpoints: their folder; must not have any.
            log: the consumption log; must not exist.

        Returns:
            The checkpoint's folder.

        Raises:
            ConfigError: the run has begun already.
            CopyError: there is no copy, or a damaged one.
        """
        with self._named("cannot read"):
            copies = self._complete()
            name = max(copies, key=_version, default=None)
            if name is None:
                raise CopyError(f"there is no copy of a checkpoint below {self._url}")
            source, best = f"{self._root}/{name}/{log.name}", self._best(copies)
            wanted = [name, best.checkpoint] if best is not None and best.checkpoint != name else [name]
            present, here = list_checkpoints(checkpoints), _digests_by_name(checkpoints)
            interrupted = log.exists() and self._is_equal(log, source)
            if present:
                # All that is there is of the copies, and the best one may be missing.
                interrupted &= best is not None and not (checkpoints / BEST_NAME).exists() and name in here
                interrupted &= all(
                    each.name in wanted and copies[each.name] == here.get(each.name) for _, each in present
                )
            if (present or log.exists()) and not interrupted:
                raise ConfigError(
                    f"{checkpoints.parent} has a run already", hint="choose another folder: nothing is overwritten"
                )
            fetched = {each: self._download(each, checkpoints) for each in wanted if each not in here}
            if name in fetched and not (fetched[name] / log.name).exists():
                raise CopyError(f"{source} is missing: without it the run would train the same prompts again")
        for each, folder in fetched.items():
            if each == name:
                (folder / log.name).replace(log)
            (folder / log.name).unlink(missing_ok=True)
            folder.rename(checkpoints / each)
        if best is not None:
            restore_best(checkpoints, best)
        return checkpoints / name

    def _require_bucket(self) -> None:
        bucket = self._root.partition("/")[0]
        try:
            # Not `exists`, which is False for missing credentials too.
            _ = bucket and self._files.info(bucket)
        except FileNotFoundError:
            # To make its folder would make it, with rights that no one has chosen.
            raise CopyError(
                f"cannot write {self._url}: there is no bucket {bucket}", hint="create it, or change checkpoint.copy_to"
            ) from None

    def _complete(self) -> dict[str, bytes]:
        """The complete copies by name, with their lists of digests."""
        self._files.invalidate_cache()
        found = {path.rsplit("/", 2)[1]: path for path in self._files.glob(f"{self._root}/*/{DIGESTS_NAME}")}
        lists = {name: self._files.cat_file(path) for name, path in found.items() if version_of(name) is not None}
        return {name: digests for name, digests in lists.items() if _is_whole(digests)}

    def _add(self, folder: Path, log: Path, digests: bytes, *, replace: bool) -> bool:
        """Copies a checkpoint; False where it was removed meanwhile.

        Args:
            folder: of the checkpoint.
            log: the consumption log.
            digests: content of its list, which names its files.
            replace: a copy of that name has other files, of steps that were undone.
        """
        out = f"{self._root}/{folder.name}"
        self.uploading = folder.name
        try:
            if replace:
                self._remove(folder.name, complete=True)
            files = {name: folder / name for name in json.loads(digests)}
            if log.exists():
                files[log.name] = log
            for name, path in files.items():
                self._put(path, f"{out}/{name}")
            self._files.invalidate_cache()
            lost = files.keys() - {path.removeprefix(f"{out}/") for path in self._files.find(out)}
            if lost:
                # By the learner that has taken over from this one, which does not know it yet.
                raise CopyError(f"{out}/{min(lost)} was removed while {folder.name} was copied")
            self._files.pipe_file(f"{out}/{DIGESTS_NAME}", digests)
        except FileNotFoundError:
            if folder.exists():
                raise
            if self._files.exists(out):
                self._files.rm(out, recursive=True)
            return False
        finally:
            self.uploading = None
        return True

    def _copy_best(self, file: Path, here: Mapping[str, bytes]) -> None:
        """Copies the file about the best checkpoint, where that has a copy."""
        best, out = _best_of(file.parent), f"{self._root}/{file.name}"
        if best in here and self._complete().get(best) == here[best] and not self._is_equal(file, out):
            self._files.pipe_file(out, file.read_bytes())

    def _is_equal(self, file: Path, out: str) -> bool:
        return self._files.exists(out) and bool(self._files.cat_file(out) == file.read_bytes())

    def _remove_needless(self, checkpoints: Path) -> None:
        here, there = _digests_by_name(checkpoints), self._complete()
        copied = [name for name, digests in there.items() if here.get(name, digests) == digests]
        spared = None if (best := self._read_best()) is None else best.checkpoint
        newest_here, newest_copy = (max(map(_version, names), default=_NONE) for names in (here, copied))
        for path in self._files.ls(self._root, detail=False):
            name = path.rstrip("/").rpartition("/")[2]
            if version_of(name) is None or name in here or name == spared or _version(name) > newest_here:
                continue
            # Without its list it is an upload that broke off. This thread alone makes those of this learner, and one
            # that was fenced looks for its files before it writes a list.
            if name not in there or _version(name) < newest_copy:
                self._remove(name, complete=name in there)

    def _best(self, copies: Container[str]) -> Best | None:
        """The best checkpoint as the run saw it; None where it has no copy."""
        best = self._read_best()
        if best is not None and best.checkpoint not in copies:
            log.warning("%s, the best checkpoint, has no copy: the run will choose another one", best.checkpoint)
            return None
        return best

    def _read_best(self) -> Best | None:
        """The content of the copy of the file about the best checkpoint."""
        out = f"{self._root}/{BEST_NAME}"
        return parse_best(self._files.cat_file(out)) if self._files.exists(out) else None

    def _download(self, name: str, checkpoints: Path) -> Path:
        """A copy under a name that is no checkpoint's."""
        unfinished, source = checkpoints / f".partial-{name}", f"{self._root}/{name}"
        shutil.rmtree(unfinished, ignore_errors=True)
        for path in self._files.find(source):
            target = unfinished / path.removeprefix(f"{source}/")
            if ".." in target.parts:
                raise CopyError(f"{path} is not the name of a file of {name}: nothing was fetched")
            target.parent.mkdir(parents=True, exist_ok=True)
            self._files.get_file(path, str(target))
        check_digests(Ranks(0, 1, lambda message: [message]), unfinished)
        return unfinished

    def _put(self, path: Path, out: str) -> None:
        self._make(out.rpartition("/")[0])
        self._files.put_file(str(path), out)

    def _make(self, folder: str) -> None:
        # Object stores have no folders: their file systems do nothing, or look for the bucket.
        self._files.makedirs(folder, exist_ok=True)

    def _remove(self, name: str, *, complete: bool) -> None:
        if complete:
            self._files.rm_file(f"{self._root}/{name}/{DIGESTS_NAME}")
        self._files.rm(f"{self._root}/{name}", recursive=True)

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except RollmeshError:
            raise
        except Exception as error:  # every file system has errors of its own
            raise CopyError(f"{what} {self._url}: {type(error).__name__}: {error}") from error


def _is_whole(digests: bytes) -> bool:
    """False for a list whose writer has died, or still writes: a JSON object without its end is none."""
    try:
        json.loads(digests)
    except ValueError:
        return False
    return True


def _digests_by_name(checkpoints: Path) -> dict[str, bytes]:
    """The lists of a run's checkpoints, the newest first."""
    found = {}
    for _, folder in reversed(list_checkpoints(checkpoints)):
        try:
            found[folder.name] = (folder / DIGESTS_NAME).read_bytes()
        except FileNotFoundError:
            if folder.exists():
                raise
    return found


def _best_of(checkpoints: Path) -> str:
    """Name of a run's best checkpoint; empty without one."""
    best = best_checkpoint(checkpoints)
    return "" if best is None else best.checkpoint


def _version(name: str) -> PolicyVersion:
    """The version in a checkpoint's name."""
    return version_of(name) or _NONE
