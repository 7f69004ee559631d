"""Any network: buckets in chunks over gRPC, several at once, from the learner or from a generator that it names.

Invariants: a broken transfer continues at the byte where it stopped, from any source. A call is abandoned when nothing
comes, never because it takes long. Bytes from a generator are verified here: a bad one costs time alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import grpc

from rollmesh.generators.weights.host_memory import allocate
from rollmesh.generators.weights.learner_connection import is_channel_closed
from rollmesh.generators.weights.relay import HEARTBEAT_S
from rollmesh.generators.weights.transports.bucket_sources import BucketSource, BucketSources
from rollmesh.generators.weights.transports.interface import Received, Transfer, Transport
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import PayloadError, WeightsError
from rollmesh.mesh.rpc.errors import is_transient, to_rollmesh_error
from rollmesh.mesh.runtime.task_group import run_together
from rollmesh.mesh.weights import BucketSet
from rollmesh.mesh.weights.chunk_framing import parse
from rollmesh.protos import weights_pb2

_FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 1.0
# Shares of the transfer's timeout: a generator that is silent, or brings no bytes, for this long is replaced. The first
# is shorter: a generator that waits itself still sends heartbeats, and keeps those that fetch from it.
_SILENT_SHARE = 0.25
_IDLE_SHARE = 0.5
_MISSED_HEARTBEATS = 3


class GrpcTransport(Transport):
    """Fetches from Weights services.

    Args:
        streams: `weights.streams`: buckets under way at once, each on a connection of its own.
        security: token and TLS of the mesh.
    """

    name = "grpc"
    relays = True
    alone = True

    def __init__(self, *, streams: int = 2, security: SecuritySection | None = None) -> None:
        self._streams = streams
        self._security = security or SecuritySection()

    def refusal(self, bucket_set: BucketSet) -> str:  # noqa: ARG002  it can always
        """See Transport: the service has every version that is kept."""
        return ""

    async def receive(self, transfer: Transfer, arrived: Callable[[memoryview, int], None]) -> Received:
        """See Transport."""
        bucket_set = transfer.bucket_set
        data = allocate(bucket_set.nbytes)
        todo = deque(range(len(bucket_set.buckets)))
        sources = BucketSources(transfer, self._streams, self._security)

        async def work(channel_index: int) -> None:
            while todo:
                index = todo.popleft()
                await _BucketFetch(transfer, sources, index, bucket_set.part(data, index), channel_index).run()
                arrived(data, index)

        try:
            await sources.open()
            await run_together(*(work(channel_index) for channel_index in range(min(self._streams, len(todo)))))
        finally:
            await sources.close()
        return Received(data, sources.current.address)


class _BucketFetch:
    """The fetch of one bucket, over as many calls as it takes.

    Args:
        transfer: in progress.
        sources: of the bucket.
        index: of the bucket.
        target: memory for its bytes.
        channel_index: of the source's connection.
    """

    def __init__(
        self, transfer: Transfer, sources: BucketSources, index: int, target: memoryview, channel_index: int
    ) -> None:
        self._transfer = transfer
        self._sources = sources
        self._index = index
        self._target = target
        self._channel_index = channel_index
        bucket_set = transfer.bucket_set
        self._request = weights_pb2.FetchBucketRequest(policy=bucket_set.policy.to_proto(), bucket=index)
        if bucket_set.base is not None:
            self._request.base.CopyFrom(bucket_set.base.to_proto())
        self._name = bucket_set.name(index)
        self._done = 0
        self._loop = asyncio.get_running_loop()
        # Event loop times of the newest byte, and of the newest message.
        self._last_byte_at = self._last_message_at = self._loop.time()
        # Some of the bytes came from a generator.
        self._relayed = False
        self._stalled = False

    async def run(self) -> None:
        """Returns when all bytes are there.

        Raises:
            WeightsError: they do not come.
        """
        pause = _FIRST_RETRY_S
        while self._done < len(self._target):
            source, before = self._sources.current, self._done
            problem = await self._one_call(source)
            if self._done == len(self._target) and self._relayed and (damage := await self._find_damage()):
                problem, self._done, self._relayed = damage, 0, False
            if self._done == len(self._target):
                return
            idle_s = self._loop.time() - self._last_byte_at
            if idle_s >= self._transfer.timeout_s:
                raise WeightsError(
                    f"{self._name}: no byte for {self._transfer.timeout_s:.0f} s: {problem}",
                    hint="is the learner's host reachable? weights.timeout_s is how long silence is borne",
                )
            if source.address:
                await self._sources.replace(source, problem)
            elif self._done > before:
                pause = _FIRST_RETRY_S
            else:
                await asyncio.sleep(min(pause, self._transfer.timeout_s - idle_s))
                pause = min(2 * pause, _LONGEST_RETRY_S)

    async def _one_call(self, source: BucketSource) -> str:
        """Reads until the bucket is complete or the call ends; returns the problem of the call.

        Raises:
            WeightsError: asking again would not help.
        """
        try:
            await self._read(source)
        except grpc.aio.AioRpcError as error:
            if not source.address and not is_transient(error):
                raise _as_weights_error(error, self._name) from error
            return error.details() or error.code().name
        except PayloadError as error:
            if not source.address:
                raise WeightsError(f"{self._name}: {error.message}") from error
            return error.message
        except (grpc.aio.UsageError, asyncio.CancelledError) as error:
            if not is_channel_closed(error):
                raise
            if self._stalled:
                return "nothing came"
            if source.address:
                return "the connection was closed"
            raise WeightsError(f"{self._name}: the connection was closed, the learner has changed") from None
        return "the stream ended early"

    async def _read(self, source: BucketSource) -> None:
        self._request.offset = self._done
        self._stalled = False
        self._last_message_at = self._loop.time()
        call = source.fetch(self._channel_index, self._request)
        watch = _Watch(self._loop, lambda: self._deadline(source), lambda: self._stall(call))
        try:
            async for message in call:
                if self._transfer.superseded():
                    raise WeightsError(f"{self._name}: given up, another learner has announced its own weights")
                offset, chunk = parse(message)
                end = self._done + len(chunk)
                if offset != self._done or end > len(self._target):
                    raise PayloadError("offset", f"got bytes {offset} to {offset + len(chunk)}, {self._done} was next")
                self._last_message_at = self._loop.time()
                if chunk:
                    self._target[self._done : end] = chunk
                    self._done, self._last_byte_at = end, self._last_message_at
                    self._relayed |= bool(source.address)
        finally:
            watch.stop()
            call.cancel()

    def _deadline(self, source: BucketSource) -> float:
        """The time at which the call has failed, if nothing comes until then."""
        patience = self._transfer.timeout_s
        if not source.address:
            return self._last_byte_at + patience
        silent_s = max(_SILENT_SHARE * patience, _MISSED_HEARTBEATS * HEARTBEAT_S)
        return min(self._last_message_at + silent_s, self._last_byte_at + _IDLE_SHARE * patience)

    def _stall(self, call: grpc.aio.UnaryStreamCall) -> None:
        self._stalled = True
        call.cancel()

    async def _find_damage(self) -> str:
        """The damage of the bucket's bytes; empty where they agree with their digest."""
        try:
            await asyncio.to_thread(self._transfer.bucket_set.verify, self._index, self._target)
        except WeightsError as error:
            return error.message
        return ""


class _Watch:
    """Calls `on_late` once at the time that `deadline` returns, which may move meanwhile."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, deadline: Callable[[], float], on_late: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._deadline = deadline
        self._on_late = on_late
        self._handle = loop.call_at(deadline(), self._check)

    def _check(self) -> None:
        deadline = self._deadline()
        if self._loop.time() >= deadline:
            self._on_late()
        else:
            self._handle = self._loop.call_at(deadline, self._check)

    def stop(self) -> None:
        self._handle.cancel()


def _as_weights_error(error: grpc.aio.AioRpcError, call: str) -> WeightsError:
    typed = to_rollmesh_error(error, call)
    return typed if isinstance(typed, WeightsError) else WeightsError(typed.message, hint=typed.hint)
