"""Same host: the learner's file in shared memory is mapped, and nothing is copied."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable

from generators.weights.transports.base import Fetch, Received, Transport
from mesh.errors import VersionGoneError, WeightsError
from mesh.weights import Wanted


class SharedMemory(Transport):
    """Maps files of publishers on this host.

    Args:
        host_id: of this process (`mesh.hosts`).
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

    async def receive(self, fetch: Fetch, arrived: Callable[[memoryview, int], None]) -> Received:
        """See Transport; the memory is the publisher's own, which stays as long as anybody has it mapped."""
        wanted = fetch.wanted
        offer = wanted.offer(self.name)
        assert offer is not None, "refusal() was asked before"
        try:
            descriptor = os.open(offer.address, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            raise VersionGoneError(f"cannot open {offer.address}: {error.strerror}") from error
        except OSError as error:
            raise WeightsError(f"cannot open {offer.address}: {error.strerror}") from error
        try:
            found = os.fstat(descriptor).st_size
            if found < wanted.nbytes:
                raise WeightsError(f"{offer.address} has {found} bytes, {wanted.nbytes} were announced")
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
