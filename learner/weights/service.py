"""The Weights service of the learner, from which generators pull.

Invariants: `Watch` never queues, it always jumps to the newest manifest. `FetchBucket` can be repeated from any offset.
A transfer that has begun continues when its version is released.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from rollmesh.learner.weights.announcement_stream import AnnouncementStream
from rollmesh.learner.weights.publisher import WeightPublisher
from rollmesh.learner.weights.relay_tree import RelayTrees
from rollmesh.learner.weights.request_validation import check_broadcast, check_report, check_route, check_watch
from rollmesh.learner.weights.transports import Broadcast
from rollmesh.mesh.errors import PayloadError, WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.mesh.weights.chunk_framing import CHUNK_BYTES, frames
from rollmesh.protos import weights_pb2, weights_pb2_grpc

log = logging.getLogger(__name__)


class WeightsService(weights_pb2_grpc.WeightsServicer):
    """Serves a publisher's versions.

    Args:
        publisher: holds them.
        fanout: `weights.fanout`.
    """

    def __init__(self, publisher: WeightPublisher, fanout: int = 2) -> None:
        self._publisher = publisher
        self._trees = RelayTrees(fanout)
        self._watches: set[asyncio.Event] = set()
        self._closed = False

    def end_watches(self) -> None:
        """Ends every stream of announcements, as none will follow; on the event loop's thread."""
        self._closed = True
        for news in self._watches:
            news.set()

    async def GetModelBundle(
        self, _request: weights_pb2.GetModelBundleRequest, _context: Any
    ) -> AsyncIterator[weights_pb2.ModelFile]:
        """Every file; large ones in several messages of the same name."""
        for name, content in self._publisher.model_bundle.items():
            for offset in range(0, max(1, len(content)), CHUNK_BYTES):
                yield weights_pb2.ModelFile(name=name, content=content[offset : offset + CHUNK_BYTES])

    async def Watch(self, request: weights_pb2.WatchRequest, _context: Any) -> AsyncIterator[weights_pb2.Manifest]:
        """The newest manifest, and each one that is the newest when the stream is ready (see `AnnouncementStream`).

        It ends with `end_watches`.
        """
        check_watch(request)
        loop = asyncio.get_running_loop()
        news = asyncio.Event()

        def on_publish() -> None:
            loop.call_soon_threadsafe(news.set)

        unsubscribe = self._publisher.subscribe(on_publish)
        watcher = AnnouncementStream(self._publisher, request, loop.time)
        self._publisher.pushes.record_watch(request.member_id)
        self._watches.add(news)
        try:
            while not self._closed:
                news.clear()
                manifest, wait_s = watcher.next()
                if manifest is not None:
                    yield manifest
                    continue
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), wait_s)
        finally:
            self._watches.discard(news)
            unsubscribe()
            self._publisher.pushes.record_watch_end(request.member_id)

    async def FetchBucket(self, request: weights_pb2.FetchBucketRequest, _context: Any) -> AsyncIterator[bytes]:
        """The rest of a bucket from `offset` on, as serialized BucketChunks."""
        policy = PolicyVersion.from_proto(request.policy)
        base = PolicyVersion.from_proto(request.base) if request.HasField("base") else None
        bucket = self._publisher.bucket(policy, request.bucket, base)
        if request.offset > len(bucket):
            raise PayloadError("offset", f"{request.offset} lies beyond the bucket's {len(bucket)} bytes")
        with contextlib.nullcontext() if base else self._publisher.readers.reading(policy):
            for frame in frames(bucket, request.offset):
                yield frame

    async def Route(self, request: weights_pb2.RouteRequest, _context: Any) -> weights_pb2.RouteResponse:
        """The receiver's place in the tree of its version or link."""
        check_route(request)
        base = PolicyVersion.from_proto(request.base) if request.HasField("base") else None
        tree = self._trees.tree_of(PolicyVersion.from_proto(request.policy), base)
        return weights_pb2.RouteResponse(address=tree.route(request.member_id, request.address, request.failed))

    async def JoinBroadcast(
        self, request: weights_pb2.JoinBroadcastRequest, _context: Any
    ) -> weights_pb2.JoinBroadcastResponse:
        """A place in the next broadcast; a receiver that hangs up returns it."""
        check_broadcast(request)
        found = next((offer for offer in self._publisher.offers if offer.name == request.transport), None)
        if not isinstance(found, Broadcast):
            raise WeightsError(f"this learner broadcasts nothing over {request.transport!r}")
        policy = PolicyVersion.from_proto(request.policy)
        return await asyncio.wrap_future(found.join(request.member_id, policy, request.group))

    async def Report(self, request: weights_pb2.SwapReport, _context: Any) -> weights_pb2.ReportResponse:
        """Records the reports; errors are logged."""
        check_report(request)
        self._publisher.pushes.add(request)
        if request.error:
            log.warning(
                "%s could not take version %s: %s",
                request.member_id,
                PolicyVersion.from_proto(request.policy),
                request.error,
            )
        return weights_pb2.ReportResponse()

    async def Pushes(self, _request: weights_pb2.PushesRequest, _context: Any) -> weights_pb2.PushesResponse:
        """Returns the reports of receivers so far."""
        # Those of a thousand receivers would hold up this loop.
        return await asyncio.to_thread(self._publisher.pushes.to_proto)
