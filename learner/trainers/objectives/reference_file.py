"""The file of a reference policy's log-probs: as much of them as there is, for a run that continues.

Its content is numpy's, and after it the digest of that. A disk may change or lose bytes: a training would follow the
values that are left, unseen.
"""

from __future__ import annotations

import io
import logging
import time
from pathlib import Path

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from rollmesh.learner.engines.world import World
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.files import write_atomically

log = logging.getLogger(__name__)
# Work that a kill undoes; at 1,000,000 pairs a file takes 16 MB.
_EVERY_S = 60.0
_DIGEST_BYTES = 16


class ReferenceFile:
    """Sums of log-probs, float64; NaN: not computed yet.

    Args:
        path: good for one set of rows and one policy alone. Rank 0's file counts.
        world: the processes.
    """

    def __init__(self, path: Path, world: World) -> None:
        self._path = path
        self._world = world
        self._begun_s = self._written_s = time.monotonic()

    def read(self, shape: tuple[int, ...]) -> NDArray[np.float64]:
        """The sums so far, the same in every process; collective.

        Args:
            shape: of all. A file may have fewer, the first ones; one of another shape counts for nothing.

        Raises:
            DataError: rank 0 cannot read the file, or it has other bytes than were written.
        """
        sums = np.full(shape, np.nan)
        if self._leads and self._path.is_file():
            try:
                found = _from_bytes(self._path.read_bytes())
            except (OSError, ValueError) as error:
                raise DataError(
                    f"{self._path} cannot be read: {error}", hint="remove it: it is computed again"
                ) from error
            if found.shape[1:] == shape[1:] and len(found) <= len(sums):
                sums[: len(found)] = found
        return np.array(self._world.broadcast(torch.from_numpy(sums)).cpu().numpy(), dtype=np.float64)

    def keep(self, sums: NDArray[np.float64], done: int, rows: int) -> None:
        """Writes the sums, and says how far they are; rank 0 alone, and at most once a minute.

        Args:
            sums: as far as they are computed.
            done, rows: computed by this process so far, and in all.

        Raises:
            DataError: the disk refuses.
        """
        now = time.monotonic()
        if not self._leads or now - self._written_s < _EVERY_S:
            return
        self.write(sums)
        left_s = (now - self._begun_s) / max(done, 1) * (rows - done)
        log.info("reference log-probs of %d of %d rows, about %.0f min left", done, rows, left_s / 60)

    def write(self, sums: NDArray[np.float64]) -> None:
        """Replaces the file, on rank 0; it is durable then.

        Raises:
            DataError: the disk refuses.
        """
        if not self._leads:
            return
        self._written_s = time.monotonic()
        try:
            write_atomically(self._path, _to_bytes(sums), durable=True)
        except OSError as error:
            raise DataError(f"cannot write {self._path}: {error.strerror or error}", hint="free space there") from error

    @property
    def _leads(self) -> bool:
        return self._world.process == 0


def _to_bytes(sums: NDArray[np.float64]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, sums, allow_pickle=False)
    content = buffer.getvalue()
    return content + xxhash.xxh3_128_digest(content)


def _from_bytes(content: bytes) -> NDArray[np.float64]:
    """The sums of a file.

    Raises:
        ValueError: the bytes are not those of `_to_bytes`. They are not parsed then: errors of parsers are many.
    """
    content, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if xxhash.xxh3_128_digest(content) != digest:
        raise ValueError("its bytes are not those that were written")
    sums: NDArray[np.float64] = np.load(io.BytesIO(content), allow_pickle=False)
    return sums
