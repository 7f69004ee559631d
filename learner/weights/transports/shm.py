"""Shared memory: the publisher writes into a tmpfs, and receivers on this host map its files."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from rollmesh.learner.weights.published_version import PublishedVersion
from rollmesh.learner.weights.transports.interface import SenderTransport
from rollmesh.learner.weights.version_storage import usable_directory
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.runtime.hosts import host_id
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights.shared_files import sweep
from rollmesh.protos import weights_pb2

log = logging.getLogger(__name__)


class SharedMemory(SenderTransport):
    """Offers the publisher's own files; files of killed publishers are removed first.

    Args:
        directory: a tmpfs that receivers can see; checked with `usable_directory`.

    Attributes:
        directory: where versions have to be written; None once it was full.
    """

    name = "shm"
    directory: Path | None

    def __init__(self, directory: Path) -> None:
        for path in sweep(directory):
            log.info("removed %s, left by a publisher that was killed", path)
        self.directory = directory
        self._host_id = host_id()
        # Versions of equal weights share a file.
        self._offered: dict[PolicyVersion, Path] = {}

    def shortage(self, nbytes: int) -> str:
        """Says how much the directory lacks for `nbytes`; empty where they fit."""
        assert self.directory is not None, "nothing has been written yet"
        status = os.statvfs(self.directory)
        free = status.f_bavail * status.f_frsize
        return "" if nbytes <= free else f"{self.directory} has {free / 1e9:.2f} GB free of {nbytes / 1e9:.2f} GB"

    def offer(self, version: PublishedVersion) -> weights_pb2.Offer | None:
        """Offers the version's file; None once the tmpfs was full and its bytes are in anonymous memory."""
        if version.data.path is None:
            self.directory = None
            return None
        self._offered[version.policy] = version.data.path
        return weights_pb2.Offer(transport=self.name, address=str(version.data.path), host_id=self._host_id)

    def retire(self, version: PublishedVersion) -> None:
        """Unlinks the version's file, where no other version has it; receivers keep their mappings."""
        path = self._offered.pop(version.policy, None)
        if path is not None and path not in self._offered.values():
            version.data.unlink()


def shared_memory(directory: Path, *, required: bool) -> SharedMemory | None:
    """The transport; None where the directory is not usable.

    Raises:
        WeightsError: it is not usable, and is required.
    """
    if usable_directory(directory):
        return SharedMemory(directory)
    if required:
        raise WeightsError(
            f"weights.transport is shm, but no file can be created in {directory}",
            hint="mount a tmpfs there, or set weights.transport: auto",
        )
    log.info("%s is not usable: weights are sent over grpc", directory)
    return None
