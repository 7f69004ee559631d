"""Safetensors files in a folder that generators see too, on this host or over a shared file system.

Invariants: a version's folder appears under its name only when all its files are whole and on the disk. The folders
below a run are those of the present incarnation's kept versions, apart from the one being written. Folders of an
earlier incarnation, finished or not, are removed with the first version of the next: generators refuse them by then.

Writing happens before the version is announced, while the next batch trains, and takes as long as the file system
takes.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import shutil
from pathlib import Path, PurePosixPath

import numpy as np
from safetensors import SafetensorError, TensorSpec, serialize_file

from rollmesh.learner.weights.published_version import PublishedVersion
from rollmesh.learner.weights.transports.interface import SenderTransport
from rollmesh.learner.weights.version_storage import VersionBytes
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.files import fsync_path
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights.safetensors_format import INDEX_NAME, bucket_file, metadata_of, version_folder
from rollmesh.protos import weights_pb2

log = logging.getLogger(__name__)
_UNFINISHED = ".unfinished-"
# Folders of versions, finished or not. Everything else in the folder is the user's.
_FOLDER = re.compile(rf"(?P<incarnation>\d+)-\d+|{re.escape(_UNFINISHED)}(?P<of_unfinished>\d+)-\d+-[0-9a-f]+")


class Disk(SenderTransport):
    """Writes versions below `folder/<run>`.

    Args:
        folder: `weights.dir`.
        run: name of the run.

    Raises:
        WeightsError: the folder cannot be written to.
    """

    name = "disk"

    def __init__(self, folder: Path, run: str) -> None:
        self._folder = folder
        self._run = run
        # Versions of equal weights share a folder.
        self._written: dict[PolicyVersion, tuple[VersionBytes, PurePosixPath]] = {}
        probe = folder / run / f"{_UNFINISHED}{secrets.token_hex(4)}"
        try:
            probe.mkdir(parents=True)
            probe.rmdir()
        except OSError as error:
            raise WeightsError(
                f"weights.dir {folder} cannot be written to: {error.strerror}", hint="create it, or choose another"
            ) from error

    def offer(self, version: PublishedVersion) -> weights_pb2.Offer | None:
        """Writes the version's files; None where the disk refuses. See `SenderTransport`."""
        policy = version.policy
        relative = next((folder for data, folder in self._written.values() if data is version.data), None)
        if relative is None and (relative := self._write(version)) is None:
            return None
        self._written[policy] = (version.data, relative)
        return weights_pb2.Offer(transport=self.name, address=relative.as_posix())

    def retire(self, version: PublishedVersion) -> None:
        """Removes the version's files, where no other version has them; a reader in the middle finds a file missing."""
        _, folder = self._written.pop(version.policy, (None, None))
        if folder is not None and all(folder != other for _, other in self._written.values()):
            shutil.rmtree(self._folder / folder, ignore_errors=True)

    def _write(self, version: PublishedVersion) -> PurePosixPath | None:
        """Writes a version's folder, below that which all share; None where the disk refuses."""
        policy = version.policy
        unfinished = self._folder / self._run / f"{_UNFINISHED}{_name(policy)}-{secrets.token_hex(4)}"
        relative = version_folder(self._run, policy)
        try:
            self._sweep(policy.incarnation)
            unfinished.mkdir()
            _write_files(version, unfinished)
            unfinished.rename(self._folder / relative)
            fsync_path(self._folder / self._run)
        except (OSError, SafetensorError) as error:
            log.warning("version %s is not on disk, generators get it over grpc: %s", policy, error)
            shutil.rmtree(unfinished, ignore_errors=True)
            return None
        return relative

    def _sweep(self, incarnation: int) -> None:
        """Removes folders of earlier incarnations, and those that this one could not finish or remove."""
        kept = {folder.name for _, folder in self._written.values()}
        for entry in (self._folder / self._run).iterdir():
            found = _incarnation(entry.name)
            if found is not None and found <= incarnation and entry.name not in kept:
                log.info("removing %s, left by an earlier publisher", entry)
                shutil.rmtree(entry, ignore_errors=True)


def _write_files(version: PublishedVersion, folder: Path) -> None:
    """Writes all files and makes sure that they are on the disk."""
    manifest = version.manifest
    weight_map: dict[str, str] = {}
    for index in range(len(manifest.buckets)):
        entries = [entry for entry in manifest.tensors if entry.bucket == index and not entry.tied_to]
        bucket = version.bucket(index)
        data = np.frombuffer(bucket, dtype=np.uint8) if bucket else np.empty(0, dtype=np.uint8)
        specs = {
            entry.name: TensorSpec(
                dtype=entry.dtype,
                shape=list(entry.shape),
                data_ptr=data.ctypes.data + entry.offset,
                data_len=entry.nbytes,
            )
            for entry in entries
        }
        metadata = metadata_of(version.policy, manifest.digest, {entry.name: entry.offset for entry in entries})
        name = bucket_file(index, len(manifest.buckets))
        serialize_file(specs, folder / name, metadata=metadata)
        fsync_path(folder / name)
        weight_map |= dict.fromkeys(specs, name)
    total = sum(entry.nbytes for entry in manifest.tensors)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=1)
    (folder / INDEX_NAME).write_text(text, encoding="utf-8")
    for path in (folder / INDEX_NAME, folder):
        fsync_path(path)


def _name(policy: PolicyVersion) -> str:
    return f"{policy.incarnation}-{policy.version}"


def _incarnation(name: str) -> int | None:
    """The incarnation in the name of a version's folder, finished or not; None for other folders."""
    found = _FOLDER.fullmatch(name)
    return int(found["incarnation"] or found["of_unfinished"]) if found else None
