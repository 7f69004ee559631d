"""Same host: the learner's file in shared memory is mapped, and nothing is copied.

Invariants:

- Nothing is opened but what has a publisher's name in the folder of shared memory, and opening it does not wait.
- Nothing is mapped but a file of this process's own user. Others could cut theirs short, which would end this process
  by a signal.
- Errors do not describe the file: the learner gets them, and it chose the path. The log of this process does.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path

from rollmesh.generators.weights.transports.interface import Received, Transfer, Transport
from rollmesh.mesh.errors import VersionGoneError, WeightsError
from rollmesh.mesh.weights import BucketSet
from rollmesh.mesh.weights.shared_files import SHARED_MEMORY, is_shared_file

log = logging.getLogger(__name__)


class SharedMemory(Transport):
    """Maps files of publishers on this host.

    Args:
        host_id: of this process (`mesh.runtime.hosts`).
        directory: the tmpfs in which publishers of this host have their files.
    """

    name = "shm"
    alone = True

    def __init__(self, host_id: str, directory: Path = SHARED_MEMORY) -> None:
        self._host_id = host_id
        self._directory = directory

    def refusal(self, bucket_set: BucketSet) -> str:
        """See Transport."""
        offer = bucket_set.offer(self.name)
        if offer is None:
            return "the learner offers no shared memory"
        if offer.host_id != self._host_id:
            return "the learner shares no memory with this generator"
        if not is_shared_file(offer.address, self._directory):
            return f"what the learner offers is no file of a publisher in {self._directory}"
        return ""

    async def receive(self, transfer: Transfer, arrived: Callable[[memoryview, int], None]) -> Received:
        """See Transport; the memory is the publisher's own, which stays as long as a process has it mapped."""
        bucket_set = transfer.bucket_set
        offer = bucket_set.offer(self.name)
        assert offer is not None, "refusal() was asked before"
        data = memoryview(_map(offer.address, bucket_set.nbytes))
        for index in range(len(bucket_set.buckets)):
            arrived(data, index)
            # The caller may verify at once; other tasks of this loop run in between.
            await asyncio.sleep(0)
        return Received(data)


def _map(address: str, nbytes: int) -> mmap.mmap:
    """A file's beginning.

    Raises:
        WeightsError: it cannot be used; `VersionGoneError`: there is none.
    """
    try:
        descriptor = os.open(address, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise VersionGoneError(f"{address} is gone") from error
    except OSError as error:
        raise _unusable(address, str(error.strerror)) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise _unusable(address, "it is no file of our user")
        if status.st_size < nbytes:
            raise _unusable(address, f"it has {status.st_size} bytes, {nbytes} were announced")
        # A private mapping shares the pages; being writable in name, it can be given to torch without a copy.
        return mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise _unusable(address, str(error.strerror)) from error
    finally:
        os.close(descriptor)


def _unusable(address: str, why: str) -> WeightsError:
    """The same error for every reason, which is logged."""
    log.warning("cannot map %s: %s", address, why)
    return WeightsError(
        f"{address} cannot be mapped: the generator's log says why",
        hint="run learner and generator as the same user, or set weights.transport: grpc",
    )
