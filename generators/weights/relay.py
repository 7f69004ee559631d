"""Relays weights to other generators: the buckets of a version that this one is receiving, or has received.

Invariants:

- Only verified buckets are served, each as soon as it is verified. A caller that waits for one gets a message at least
  every `HEARTBEAT_S`: a relay that waits itself differs from a dead one.
- A version's full bytes are kept until those of the next one are complete. A base of adapters is kept while it is
  requested. The oldest one that is being fetched is kept
  too, so that a slow link brings a version in the end.
- A few deltas are kept as well. Bytes that were not requested for a while are released.
- Without an address nothing is kept.

A receiver verifies the bytes from here against the learner's manifest: a relay can delay a version, not change it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

import grpc

from rollmesh.mesh.errors import PayloadError, WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import BucketSet
from rollmesh.mesh.weights.active_readers import ActiveReaders
from rollmesh.mesh.weights.adapter import FROZEN_BASE
from rollmesh.mesh.weights.chunk_framing import frame, frames
from rollmesh.mesh.weights.contract import SERVICE_NAME
from rollmesh.protos import weights_pb2

HEARTBEAT_S = 1.0
# A whole version that was not requested for so long is released: others find it at the learner.
_IDLE_S = 60.0
# Deltas kept: generators that follow a chain are rarely at the same one.
_DELTAS = 8
_NOTHING = memoryview(b"")


class RelayedBuckets:
    """The buckets of one version, or of one delta, as they arrive.

    Args:
        bucket_set: the version or delta.
    """

    def __init__(self, bucket_set: BucketSet) -> None:
        self.bucket_set = bucket_set
        self.requested = False
        self._parts: dict[int, memoryview] = {}
        self._news = asyncio.Event()
        self._dropped = False

    @property
    def is_complete(self) -> bool:
        """True once every bucket is there."""
        return len(self._parts) == len(self.bucket_set.buckets)

    def add_verified(self, data: memoryview, index: int) -> None:
        """Adds a bucket that agrees with its digest.

        Args:
            data: memory of all buckets.
            index: which one.
        """
        if not self._dropped:
            self._parts[index] = self.bucket_set.part(data, index)
            self._notify()

    def drop(self) -> None:
        """Releases the bytes; waiting callers fail."""
        self._dropped = True
        self._parts.clear()
        self._notify()

    async def chunks(self, index: int, offset: int) -> AsyncIterator[bytes]:
        """The serialized chunks of a bucket from `offset` bytes on; empty ones while it is waited for.

        Raises:
            PayloadError: there is no such bucket, or it ends before the offset.
            WeightsError: it was given up.
        """
        if index >= len(self.bucket_set.buckets):
            raise PayloadError("bucket", f"{index} does not exist, there are {len(self.bucket_set.buckets)}")
        if offset > self.bucket_set.buckets[index].nbytes:
            raise PayloadError(
                "offset", f"{offset} is beyond the bucket's {self.bucket_set.buckets[index].nbytes} bytes"
            )
        self.requested = True
        while index not in self._parts:
            if self._dropped:
                raise WeightsError(f"{self.bucket_set.name(index)} is not held here any more")
            news = self._news
            try:
                await asyncio.wait_for(news.wait(), HEARTBEAT_S)
            except TimeoutError:
                yield frame(offset, _NOTHING)
        for chunk in frames(self._parts[index], offset):
            yield chunk

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class Relay:
    """The buckets that are kept for others. Used in one event loop.

    Args:
        address: under which others reach this process; empty: none do, and nothing is kept.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._kept: list[RelayedBuckets] = []
        self._readers = ActiveReaders()

    def begin(self, bucket_set: BucketSet) -> RelayedBuckets:
        """Begins to keep a version or delta that is about to be received."""
        buckets = RelayedBuckets(bucket_set)
        if self.address:
            for other in list(self._kept):
                if not other.is_complete:
                    self.end(other)
            self._kept.append(buckets)
        return buckets

    def finish(self, buckets: RelayedBuckets) -> None:
        """Records that all of it is there, and releases earlier ones."""
        if buckets not in self._kept:
            return
        deltas = [other for other in self._kept if other.bucket_set.base is not None]
        full = [
            other for other in self._kept if other.bucket_set.base is None and other.bucket_set.policy != FROZEN_BASE
        ]
        older = full[:-1] if buckets in full else []
        fetched = next((other for other in older if self._readers.active(other.bucket_set.policy)), None)
        for other in [*deltas[:-_DELTAS], *(other for other in older if other is not fetched)]:
            self.end(other)
        asyncio.get_running_loop().call_later(_IDLE_S, self._end_if_idle, buckets)

    def end(self, buckets: RelayedBuckets) -> None:
        """Releases a version that could not be received, or is not needed any more."""
        if buckets in self._kept:
            self._kept.remove(buckets)
        buckets.drop()

    def close(self) -> None:
        """Releases everything."""
        for buckets in list(self._kept):
            self.end(buckets)

    def find(self, policy: PolicyVersion, base: PolicyVersion | None) -> RelayedBuckets:
        """The buckets of a version or delta.

        Raises:
            WeightsError: it is not held.
        """
        for buckets in self._kept:
            if (buckets.bucket_set.policy, buckets.bucket_set.base) == (policy, base):
                return buckets
        raise WeightsError(f"version {policy} is not held here", hint="fetch it from the learner")

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serves FetchBucket of the Weights service; its other calls stay unimplemented."""
        handler = grpc.unary_stream_rpc_method_handler(
            self._fetch_bucket,
            request_deserializer=weights_pb2.FetchBucketRequest.FromString,
            response_serializer=weights_pb2.BucketChunk.SerializeToString,
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, {"FetchBucket": handler}),))

    async def _fetch_bucket(self, request: weights_pb2.FetchBucketRequest, _context: Any) -> AsyncIterator[bytes]:
        policy = PolicyVersion.from_proto(request.policy)
        base = PolicyVersion.from_proto(request.base) if request.HasField("base") else None
        buckets = self.find(policy, base)
        with nullcontext() if base else self._readers.reading(policy):
            async for chunk in buckets.chunks(request.bucket, request.offset):
                yield chunk

    def _end_if_idle(self, buckets: RelayedBuckets) -> None:
        if buckets not in self._kept:
            return
        if buckets.requested:
            buckets.requested = False
            asyncio.get_running_loop().call_later(_IDLE_S, self._end_if_idle, buckets)
        else:
            self.end(buckets)
