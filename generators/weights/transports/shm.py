"""Same host: the learner's file in shared memory is mapped, and nothing is copied.

Invariant: whatever lies at the path that the learner names, opening it does not wait, and nothing is mapped but a file
of this process's own user. Others could cut theirs short, which would end this process by a signal.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import stat
from collections.abc import Callable

from rollmesh.generators.weights.transports.base import Received, Transfer, Transport
from rollmesh.mesh.errors import VersionGoneError, WeightsError
from rollmesh.mesh.weights import Wanted


class SharedMemory(Transport):
    """Maps files of publishers on this host.

    Args:
        host_id: of this process (`mesh.runtime.hosts`).
    """

    name = "shm"
    alone = True

    def __init__(self, host_id: str) -> None:
        self._host_id = host_id

    def refusal(self, wanted: Wanted) -> str:
        """See Transport."""
        offer = wanted.offer(self.name)
        if offer is None:
            return "the learner offers no shared memory"
        return "" if offer.host_id == self._host_id else "the learner shares no memory with this generator"

    async def receive(self, transfer: Transfer, arrived: Callable[[memoryview, int], None]) -> Received:
        """See Transport; the memory is the publisher's own, which stays as long as anybody has it mapped."""
        wanted = transfer.wanted
        offer = wanted.offer(self.name)
        assert offer is not None, "refusal() was asked before"
        try:
            descriptor = os.open(offer.address, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise VersionGoneError(f"cannot open {offer.address}: {error.strerror}") from error
        except OSError as error:
            raise WeightsError(f"cannot open {offer.address}: {error.strerror}") from error
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                raise WeightsError(
                    f"{offer.address} is no file of our user",
                    hint="run learner and generator as the same user, or set weights.transport: grpc",
                )
            if found.st_size < wanted.nbytes:
                raise WeightsError(f"{offer.address} has {found.st_size} bytes, {wanted.nbytes} were announced")
            # A private mapping shares the pages; being writable in name, it can be given to torch without a copy.
            data = memoryview(mmap.mmap(descriptor, wanted.nbytes, access=mmap.ACCESS_COPY))
        except OSError as error:
            raise WeightsError(f"cannot map {offer.address}: {error.strerror}") from error
        finally:
            os.close(descriptor)
        for index in range(len(wanted.buckets)):
            arrived(data, index)
            # The caller may verify at once; whatever else runs in this loop comes between.
            await asyncio.sleep(0)
        return Received(data)
