"""Any network: buckets in chunks over gRPC, several at once, from the learner or from a generator that it names.

Invariants: a broken transfer continues at the byte where it stopped, from whatever source; a call is given up when
nothing comes, never because it takes long; bytes from a generator are verified here: a bad one costs time alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import grpc

from rollmesh.generators.weights.host_memory import allocate
from rollmesh.generators.weights.learner_connection import is_channel_closed
from rollmesh.generators.weights.relay import HEARTBEAT_S
from rollmesh.generators.weights.transports.base import Received, Transfer, Transport
from rollmesh.generators.weights.transports.bucket_sources import BucketSource, BucketSources
from rollmesh.mesh.config.models import SecuritySection
from rollmesh.mesh.errors import PayloadError, WeightsError
from rollmesh.mesh.rpc.errors import is_transient, to_rollmesh_error
from rollmesh.mesh.runtime.task_group import run_together
from rollmesh.mesh.weights import Wanted
from rollmesh.mesh.weights.chunk_framing import parse
from rollmesh.protos import weights_pb2

_FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 1.0
# Of the transfer's patience: a generator that says nothing for so long, or brings nothing, is left for another.
# The first is shorter: those who fetch from one that waits itself still hear from it, and stay.
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

    def refusal(self, wanted: Wanted) -> str:  # noqa: ARG002  it can always
        """See Transport: the service has every version that is kept."""
        return ""

    async def receive(self, transfer: Transfer, arrived: Callable[[memoryview, int], None]) -> Received:
        """See Transport."""
        wanted = transfer.wanted
        data = allocate(wanted.nbytes)
        todo = deque(range(len(wanted.buckets)))
        sources = BucketSources(transfer, self._streams, self._security)

        async def work(lane: int) -> None:
            while todo:
                index = todo.popleft()
                await _BucketFetch(transfer, sources, index, wanted.part(data, index), lane).run()
                arrived(data, index)

        try:
            await sources.open()
            await run_together(*(work(lane) for lane in range(min(self._streams, len(todo)))))
        finally:
            await sources.close()
        return Received(data, sources.current.address)


class _BucketFetch:
    """One bucket, over as many calls as it takes.

    Args:
        transfer: what is fetched, and for whom.
        sources: whom to ask.
        index: of the bucket.
        target: where its bytes go.
        lane: which of a source's connections.
    """

    def __init__(self, transfer: Transfer, sources: BucketSources, index: int, target: memoryview, lane: int) -> None:
        self._transfer = transfer
        self._sources = sources
        self._index = index
        self._target = target
        self._lane = lane
        wanted = transfer.wanted
        self._request = weights_pb2.FetchBucketRequest(policy=wanted.policy.to_proto(), bucket=index)
        if wanted.base is not None:
            self._request.base.CopyFrom(wanted.base.to_proto())
        self._name = wanted.name(index)
        self._done = 0
        self._loop = asyncio.get_running_loop()
        # Event loop times of the newest byte, and of the newest message.
        self._progress = self._heard = self._loop.time()
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
            if self._done == len(self._target) and self._relayed and (damage := await self._damage()):
                problem, self._done, self._relayed = damage, 0, False
            if self._done == len(self._target):
                return
            idle_s = self._loop.time() - self._progress
            if idle_s >= self._transfer.timeout_s:
                raise WeightsError(
                    f"{self._name}: no byte for {self._transfer.timeout_s:.0f} s: {problem}",
                    hint="is the learner's host reachable? weights.timeout_s is how long silence is borne",
                )
            if source.address:
                await self._sources.leave(source, problem)
            elif self._done > before:
                pause = _FIRST_RETRY_S
            else:
                await asyncio.sleep(min(pause, self._transfer.timeout_s - idle_s))
                pause = min(2 * pause, _LONGEST_RETRY_S)

    async def _one_call(self, source: BucketSource) -> str:
        """Reads until the bucket is complete or the call ends; returns what was wrong with it.

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
        self._heard = self._loop.time()
        call = source.fetch(self._lane, self._request)
        watch = _Watch(self._loop, lambda: self._due(source), lambda: self._stall(call))
        try:
            async for message in call:
                if self._transfer.superseded():
                    raise WeightsError(f"{self._name}: given up, another learner has announced its own weights")
                offset, chunk = parse(message)
                end = self._done + len(chunk)
                if offset != self._done or end > len(self._target):
                    raise PayloadError("offset", f"got bytes {offset} to {offset + len(chunk)}, {self._done} was next")
                self._heard = self._loop.time()
                if chunk:
                    self._target[self._done : end] = chunk
                    self._done, self._progress = end, self._heard
                    self._relayed |= bool(source.address)
        finally:
            watch.stop()
            call.cancel()

    def _due(self, source: BucketSource) -> float:
        """When the call has failed, if nothing comes until then."""
        patience = self._transfer.timeout_s
        if not source.address:
            return self._progress + patience
        silent_s = max(_SILENT_SHARE * patience, _MISSED_HEARTBEATS * HEARTBEAT_S)
        return min(self._heard + silent_s, self._progress + _IDLE_SHARE * patience)

    def _stall(self, call: grpc.aio.UnaryStreamCall) -> None:
        self._stalled = True
        call.cancel()

    async def _damage(self) -> str:
        """What is wrong with the bucket's bytes; empty: nothing."""
        try:
            await asyncio.to_thread(self._transfer.wanted.verify, self._index, self._target)
        except WeightsError as error:
            return error.message
        return ""


class _Watch:
    """Calls `late` once when the time that `due` names has come; `due` may move meanwhile."""

    def __init__(self, loop: asyncio.AbstractEventLoop, due: Callable[[], float], late: Callable[[], None]) -> None:
        self._loop = loop
        self._due = due
        self._late = late
        self._handle = loop.call_at(due(), self._look)

    def _look(self) -> None:
        due = self._due()
        if self._loop.time() >= due:
            self._late()
        else:
            self._handle = self._loop.call_at(due, self._look)

    def stop(self) -> None:
        self._handle.cancel()


def _as_weights_error(error: grpc.aio.AioRpcError, what: str) -> WeightsError:
    typed = to_rollmesh_error(error, what)
    return typed if isinstance(typed, WeightsError) else WeightsError(typed.message, hint=typed.hint)
