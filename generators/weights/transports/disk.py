"""A folder that learner and generator share: safetensors files, read bucket by bucket.

Files are read, not mapped: one that is cut short or removed meanwhile is an error, not a signal. A file system that
hangs blocks one thread, of this transport's own; while it hangs, versions come over another transport.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path, PurePosixPath

from rollmesh.generators.weights.host_memory import allocate
from rollmesh.generators.weights.transports.interface import Received, Transfer, Transport
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.weights import BucketSet
from rollmesh.mesh.weights.safetensors_format import LENGTH_BYTES, bucket_file, header_length, parse_header


class Disk(Transport):
    """Reads the files that the learner wrote.

    Args:
        folder: `weights.dir` as this host sees it; None if this host lacks it.
    """

    name = "disk"

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._reading: Future[None] | None = None

    def refusal(self, bucket_set: BucketSet) -> str:
        """See Transport."""
        offer = bucket_set.offer(self.name)
        if offer is None:
            return "the learner offers no files"
        if self._folder is None:
            return "weights.dir is not set here"
        if PurePosixPath(offer.address).is_absolute() or ".." in PurePosixPath(offer.address).parts:
            return f"{offer.address} lies outside weights.dir"
        # Looking whether the folder is there could hang as well.
        hangs = self._reading is not None and not self._reading.done()
        return f"weights.dir {self._folder} hangs since an earlier version" if hangs else ""

    async def receive(self, transfer: Transfer, arrived: Callable[[memoryview, int], None]) -> Received:
        """See Transport; a file system that hangs is left to itself when the deadline has passed."""
        bucket_set = transfer.bucket_set
        offer = bucket_set.offer(self.name)
        assert offer is not None and self._folder is not None, "refusal() was asked before"  # noqa: PT018
        data = allocate(bucket_set.nbytes)
        for index in range(len(bucket_set.buckets)):
            if transfer.superseded():
                raise WeightsError(f"{bucket_set.name(index)}: given up, another learner has announced its own weights")
            path = self._folder / offer.address / bucket_file(index, len(bucket_set.buckets))
            self._reading = _in_thread(partial(_read, path, bucket_set, index, bucket_set.part(data, index)))
            try:
                await asyncio.wait_for(asyncio.wrap_future(self._reading), transfer.timeout_s)
            except TimeoutError:
                raise WeightsError(
                    f"{bucket_set.name(index)}: {path} could not be read within {transfer.timeout_s:.0f} s",
                    hint="raise weights.timeout_s if the file system is slow",
                ) from None
            arrived(data, index)
        return Received(data)


def _in_thread(read: Callable[[], None]) -> Future[None]:
    """Reads in a thread of its own: one that hangs blocks nothing else, not even the end of the process."""
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            read()
        except (WeightsError, ValueError, MemoryError) as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="read-weights", daemon=True).start()
    return done


def _read(path: Path, bucket_set: BucketSet, index: int, target: memoryview) -> None:
    """Reads one file into its bucket, which is all zeros before."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            length = header_length(os.pread(descriptor, LENGTH_BYTES, 0))
            tensors = parse_header(os.pread(descriptor, length, LENGTH_BYTES), bucket_set.digest, len(target))
            for tensor in tensors:
                _fill(descriptor, tensor.position, target[tensor.offset : tensor.offset + tensor.nbytes])
        finally:
            os.close(descriptor)
    except OSError as error:
        raise WeightsError(f"{bucket_set.name(index)}: cannot read {path}: {error.strerror}") from error
    except WeightsError as error:
        raise WeightsError(f"{bucket_set.name(index)}: {path}: {error.message}") from error


def _fill(descriptor: int, position: int, target: memoryview) -> None:
    done = 0
    while done < len(target):
        read = os.preadv(descriptor, [target[done:]], position + done)
        if read == 0:
            raise WeightsError(f"it ends {len(target) - done} bytes early")
        done += read
