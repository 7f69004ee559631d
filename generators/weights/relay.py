"""What a generator serves to others: the buckets of a version that it is receiving, or has received.

Invariants: only verified buckets are served, each as soon as it is; whoever waits for one hears something at least
every `HEARTBEAT_S`, so that a relay that waits itself is told from one that is dead; a version's full bytes are kept
until those of the next one are whole, and in addition the oldest one that is being fetched, so that a slow link brings
a version in the end; a few links of differences are kept as well, nothing for which nobody has asked for a while;
without an address nothing is kept.

A receiver verifies what it gets from here against the learner's manifest: a relay can delay a version, not change it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

import grpc

from rollmesh.mesh.errors import PayloadError, WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights import Wanted
from rollmesh.mesh.weights.active_readers import ActiveReaders
from rollmesh.mesh.weights.chunk_framing import frame, frames
from rollmesh.protos import weights_pb2

SERVICE_NAME = weights_pb2.DESCRIPTOR.services_by_name["Weights"].full_name
HEARTBEAT_S = 1.0
# A whole version that was not requested for so long is released: others find it at the learner.
_IDLE_S = 60.0
# Links of differences kept: those who follow a chain are rarely at the same one.
_LINKS = 8
_NOTHING = memoryview(b"")


class RelayedBuckets:
    """The buckets of one version, or of one delta, as they arrive.

    Args:
        wanted: what they are.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.asked_for = False
        self._parts: dict[int, memoryview] = {}
        self._news = asyncio.Event()
        self._dropped = False

    @property
    def whole(self) -> bool:
        """Whether every bucket is there."""
        return len(self._parts) == len(self.wanted.buckets)

    def verified(self, data: memoryview, index: int) -> None:
        """A bucket is there and agrees with its digest.

        Args:
            data: memory of all buckets.
            index: which one.
        """
        if not self._dropped:
            self._parts[index] = self.wanted.part(data, index)
            self._tell()

    def drop(self) -> None:
        """Lets go of the bytes; who waits for more is told."""
        self._dropped = True
        self._parts.clear()
        self._tell()

    async def chunks(self, index: int, offset: int) -> AsyncIterator[bytes]:
        """The serialized chunks of a bucket from `offset` bytes on; empty ones while it is waited for.

        Raises:
            PayloadError: there is no such bucket, or it ends before the offset.
            WeightsError: it was given up.
        """
        if index >= len(self.wanted.buckets):
            raise PayloadError("bucket", f"{index} does not exist, there are {len(self.wanted.buckets)}")
        if offset > self.wanted.buckets[index].nbytes:
            raise PayloadError("offset", f"{offset} lies behind the bucket's {self.wanted.buckets[index].nbytes} bytes")
        self.asked_for = True
        while index not in self._parts:
            if self._dropped:
                raise WeightsError(f"{self.wanted.name(index)} is not held here any more")
            news = self._news
            try:
                await asyncio.wait_for(news.wait(), HEARTBEAT_S)
            except TimeoutError:
                yield frame(offset, _NOTHING)
        for chunk in frames(self._parts[index], offset):
            yield chunk

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class Relay:
    """Holdings by what they are. Used in one event loop.

    Args:
        address: under which others reach this process; empty: none do, and nothing is kept.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._holdings: list[RelayedBuckets] = []
        self._readers = ActiveReaders()

    def begin(self, wanted: Wanted) -> RelayedBuckets:
        """What is about to be received."""
        holding = RelayedBuckets(wanted)
        if self.address:
            for other in list(self._holdings):
                if not other.whole:
                    self.end(other)
            self._holdings.append(holding)
        return holding

    def finish(self, holding: RelayedBuckets) -> None:
        """All of it is there: earlier ones give way."""
        if holding not in self._holdings:
            return
        links = [other for other in self._holdings if other.wanted.base is not None]
        full = [other for other in self._holdings if other.wanted.base is None]
        older = full[:-1] if holding in full else []
        fetched = next((other for other in older if self._readers.active(other.wanted.policy)), None)
        for other in [*links[:-_LINKS], *(other for other in older if other is not fetched)]:
            self.end(other)
        asyncio.get_running_loop().call_later(_IDLE_S, self._end_if_idle, holding)

    def end(self, holding: RelayedBuckets) -> None:
        """Releases it: it could not be received, or is of no use any more."""
        if holding in self._holdings:
            self._holdings.remove(holding)
        holding.drop()

    def close(self) -> None:
        """Releases everything."""
        for holding in list(self._holdings):
            self.end(holding)

    def holding(self, policy: PolicyVersion, base: PolicyVersion | None) -> RelayedBuckets:
        """What was asked for.

        Raises:
            WeightsError: it is not held.
        """
        for holding in self._holdings:
            if (holding.wanted.policy, holding.wanted.base) == (policy, base):
                return holding
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
        holding = self.holding(policy, base)
        with nullcontext() if base else self._readers.reading(policy):
            async for chunk in holding.chunks(request.bucket, request.offset):
                yield chunk

    def _end_if_idle(self, holding: RelayedBuckets) -> None:
        if holding not in self._holdings:
            return
        if holding.asked_for:
            holding.asked_for = False
            asyncio.get_running_loop().call_later(_IDLE_S, self._end_if_idle, holding)
        else:
            self.end(holding)
