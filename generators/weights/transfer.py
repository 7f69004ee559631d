"""Getting the bytes of a version, over shared memory or gRPC, verified.

Invariant: what these functions return agrees with the digests of its manifest; anything else ends in a WeightsError.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import grpc

from generators.learner_link import closed_under_call
from mesh.errors import WeightsError
from mesh.rpc import is_transient, to_rollmesh_error
from mesh.versions import PolicyVersion
from mesh.weights import bucket_offsets, total_bytes, verify_bucket
from protos import weights_pb2, weights_pb2_grpc

if TYPE_CHECKING:
    import torch

Transport = Literal["shm", "grpc"]
# Verifying more than this would hold up the event loop for milliseconds.
_VERIFY_INLINE_BYTES = 8 << 20
_FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 1.0


class SharedFileGoneError(WeightsError):
    """The shared file cannot be opened here; another transport may do."""


@dataclass(frozen=True, slots=True)
class ReceivedVersion:
    """The verified bytes of a version.

    Attributes:
        manifest: as announced.
        data: all buckets, one behind the other; alive as long as this object or a tensor of it.
        transport: on which they came.
        first_byte_ns, last_byte_ns: Unix time in nanoseconds; the last one when all was verified.
    """

    manifest: weights_pb2.Manifest
    data: memoryview
    transport: Transport
    first_byte_ns: int
    last_byte_ns: int

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor); the tensors are views of `data`."""
        from mesh.weights.tensors import named_tensors

        return named_tensors(self.manifest, self.data)


async def receive_shared(manifest: weights_pb2.Manifest) -> ReceivedVersion:
    """Maps the shared file of a version; nothing is copied.

    Raises:
        SharedFileGoneError: the file cannot be opened here.
        WeightsError: it is not what was announced.
    """
    nbytes = total_bytes(manifest)
    try:
        descriptor = os.open(manifest.shm_path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        raise SharedFileGoneError(f"cannot open {manifest.shm_path}: {error.strerror}") from error
    try:
        found = os.fstat(descriptor).st_size
        if found < nbytes:
            raise WeightsError(f"{manifest.shm_path} has {found} bytes, {nbytes} were announced")
        # A private mapping shares the pages; being writable in name, it can be given to torch without a copy.
        data = memoryview(mmap.mmap(descriptor, nbytes, access=mmap.ACCESS_COPY))
    finally:
        os.close(descriptor)
    first_byte_ns = time.time_ns()
    await _verify(manifest, data)
    return ReceivedVersion(manifest, data, "shm", first_byte_ns, time.time_ns())


async def receive_over_grpc(
    stub: weights_pb2_grpc.WeightsStub,
    manifest: weights_pb2.Manifest,
    *,
    timeout_s: float,
    superseded: Callable[[], bool],
) -> ReceivedVersion:
    """Fetches every bucket; a broken transfer goes on at the byte where it stopped.

    Args:
        stub: of the learner that announced the version.
        manifest: checked.
        timeout_s: deadline of one bucket, all its tries together.
        superseded: asked between tries: whether going on is pointless.

    Raises:
        WeightsError: a bucket did not arrive in time, is damaged, or the version is not kept any more.
    """
    data = memoryview(bytearray(total_bytes(manifest)))
    first_byte_ns = 0
    for index, (start, bucket) in enumerate(zip(bucket_offsets(manifest), manifest.buckets, strict=True)):
        fetch = _BucketFetch(stub, manifest, index, data[start : start + bucket.nbytes])
        await fetch.run(timeout_s, superseded)
        first_byte_ns = first_byte_ns or fetch.first_byte_ns
    await _verify(manifest, data)
    return ReceivedVersion(manifest, data, "grpc", first_byte_ns, time.time_ns())


class _BucketFetch:
    """One bucket, over as many calls as it takes."""

    def __init__(
        self, stub: weights_pb2_grpc.WeightsStub, manifest: weights_pb2.Manifest, index: int, target: memoryview
    ) -> None:
        self._stub = stub
        self._request = weights_pb2.FetchBucketRequest(policy=manifest.policy, bucket=index)
        self._name = f"bucket {index} of version {PolicyVersion.from_proto(manifest.policy)}"
        self._target = target
        self._done = 0
        self.first_byte_ns = 0

    async def run(self, timeout_s: float, superseded: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        pause = _FIRST_RETRY_S
        last_error = "no answer"
        while self._done < len(self._target):
            if superseded():
                raise WeightsError(f"{self._name}: given up, another learner has announced its own weights")
            remaining = deadline - loop.time()
            if remaining <= 0:
                raise WeightsError(
                    f"{self._name} did not arrive within {timeout_s:.0f} s: {last_error}",
                    hint="raise weights.timeout_s if the link is slow",
                )
            before = self._done
            try:
                await self._one_call(remaining)
            except grpc.aio.AioRpcError as error:
                if not is_transient(error):
                    raise _as_weights_error(error, self._name) from error
                last_error = error.details() or error.code().name
            except (grpc.aio.UsageError, asyncio.CancelledError) as error:
                if not closed_under_call(error):
                    raise
                raise WeightsError(f"{self._name}: the connection was closed, the learner has changed") from None
            if self._done > before:
                pause = _FIRST_RETRY_S
            elif self._done < len(self._target):
                await asyncio.sleep(min(pause, remaining))
                pause = min(2 * pause, _LONGEST_RETRY_S)

    async def _one_call(self, timeout_s: float) -> None:
        self._request.offset = self._done
        async for chunk in self._stub.FetchBucket(self._request, timeout=timeout_s):
            end = self._done + len(chunk.data)
            if chunk.offset != self._done or end > len(self._target):
                raise WeightsError(f"{self._name}: got bytes from {chunk.offset} on, {self._done} was next")
            self.first_byte_ns = self.first_byte_ns or time.time_ns()
            self._target[self._done : end] = chunk.data
            self._done = end


async def _verify(manifest: weights_pb2.Manifest, data: memoryview) -> None:
    def verify() -> None:
        for index, (start, bucket) in enumerate(zip(bucket_offsets(manifest), manifest.buckets, strict=True)):
            verify_bucket(manifest, index, data[start : start + bucket.nbytes])

    if len(data) <= _VERIFY_INLINE_BYTES:
        verify()
    else:
        await asyncio.to_thread(verify)


def _as_weights_error(error: grpc.aio.AioRpcError, what: str) -> WeightsError:
    typed = to_rollmesh_error(error, what)
    return typed if isinstance(typed, WeightsError) else WeightsError(typed.message, hint=typed.hint)
