"""Broadcast over gloo or nccl: the learner sends every bucket once, to all that have joined.

Invariants: blocking steps run in a thread, each with a deadline. A receiver that fails or is cancelled leaves the
group, which ends the round for all of its members. After a round that succeeded the group is kept, for rounds with the
same members.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc

from rollmesh.generators.weights.host_memory import allocate
from rollmesh.generators.weights.learner_connection import is_channel_closed
from rollmesh.generators.weights.transports.interface import Received, Transfer, Transport
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.rpc.errors import to_rollmesh_error
from rollmesh.mesh.runtime.devices import has_cuda
from rollmesh.mesh.weights import BucketSet
from rollmesh.protos import weights_pb2

if TYPE_CHECKING:
    from rollmesh.mesh.weights.broadcast import BroadcastBackend, BroadcastGroup


class Broadcast(Transport):
    """Takes part in the learner's broadcasts.

    Args:
        backend: gloo, or nccl on this process's CUDA device.
    """

    def __init__(self, backend: BroadcastBackend) -> None:
        self.name = backend
        self._backend = backend
        self._group: BroadcastGroup | None = None

    def refusal(self, bucket_set: BucketSet) -> str:
        """See Transport."""
        if bucket_set.offer(self.name) is None:
            return f"the learner offers no broadcast over {self.name}"
        return "there is no CUDA device here" if self._backend == "nccl" and not has_cuda() else ""

    async def receive(self, transfer: Transfer, arrived: Callable[[memoryview, int], None]) -> Received:
        """See Transport."""
        bucket_set = transfer.bucket_set
        answer = await self._join(transfer)
        data = allocate(bucket_set.nbytes)
        loop = asyncio.get_running_loop()
        arrivals: asyncio.Queue[int | None] = asyncio.Queue()

        def on_bucket(index: int | None) -> None:
            loop.call_soon_threadsafe(arrivals.put_nowait, index)

        round_ = _Round(self._group, answer, self._backend, bucket_set, data, transfer.timeout_s, on_bucket)
        self._group = None
        thread = asyncio.create_task(asyncio.to_thread(round_.run))
        try:
            while (index := await arrivals.get()) is not None:
                arrived(data, index)
                if transfer.superseded():
                    raise WeightsError(
                        f"{bucket_set.name(index)}: given up, another learner has announced its own weights"
                    )
            self._group = await thread
        finally:
            if self._group is None:
                round_.leave()
                # It ends by itself within the timeout; its result is not needed.
                thread.add_done_callback(lambda done: done.cancelled() or done.exception())
        return Received(data)

    async def close(self) -> None:
        """See Transport."""
        if self._group is not None:
            self._group.close()
            self._group = None

    async def _join(self, transfer: Transfer) -> weights_pb2.JoinBroadcastResponse:
        request = weights_pb2.JoinBroadcastRequest(
            member_id=transfer.member_id,
            policy=transfer.bucket_set.policy.to_proto(),
            transport=self.name,
            group=self._group.name if self._group is not None else "",
        )
        round_name = f"version {transfer.bucket_set.policy} over {self.name}"
        try:
            return await transfer.connection.weights.JoinBroadcast(request, timeout=transfer.timeout_s)
        except grpc.aio.AioRpcError as error:
            typed = to_rollmesh_error(error, round_name)
            raise WeightsError(typed.message, hint=typed.hint) from error
        except (grpc.aio.UsageError, asyncio.CancelledError) as error:
            if not is_channel_closed(error):
                raise
            raise WeightsError(f"{round_name}: the connection was closed, the learner has changed") from None


class _Round:
    """A broadcast, in a thread; `leave` may be called from another one.

    Args:
        kept: the group of the round before.
        answer: of the learner.
        on_bucket: called with the index of each bucket that has come, and with None at the end, also of a failure.
    """

    def __init__(
        self,
        kept: BroadcastGroup | None,
        answer: weights_pb2.JoinBroadcastResponse,
        backend: BroadcastBackend,
        bucket_set: BucketSet,
        data: memoryview,
        timeout_s: float,
        on_bucket: Callable[[int | None], None],
    ) -> None:
        self._group = kept
        self._answer = answer
        self._backend = backend
        self._bucket_set = bucket_set
        self._data = data
        self._timeout_s = timeout_s
        self._on_bucket = on_bucket
        self._left = False

    def run(self) -> BroadcastGroup:
        """Receives all buckets; returns the group, which can be used again.

        Raises:
            WeightsError: the round has failed.
        """
        try:
            group = self._join_group()
            group.begin_round()
            self._receive(group)
        except WeightsError:
            self.leave()
            raise
        # torch says RuntimeError where it means memory, streams or devices.
        except (RuntimeError, MemoryError) as error:
            self.leave()
            raise WeightsError(f"{self._bucket_set.name(0)}: {self._backend} broadcast: {error}") from error
        else:
            return group
        finally:
            self._on_bucket(None)

    def leave(self) -> None:
        """Leaves the group, which ends the round."""
        self._left = True
        if self._group is not None:
            self._group.close()

    def _join_group(self) -> BroadcastGroup:
        """The group that the learner named."""
        # Imported late: torch takes a second, and most generators never broadcast.
        import torch

        from rollmesh.mesh.weights.broadcast import BroadcastGroup, BroadcastRank
        from rollmesh.mesh.weights.rendezvous import connect_store, own_host

        if self._group is not None and self._group.name == self._answer.group:
            return self._group
        if self._group is not None:
            self._group.close()
        address = self._answer.address
        cuda = self._backend == "nccl"
        place = BroadcastRank(
            rank=self._answer.rank,
            size=self._answer.world_size,
            host=own_host(address),
            device=torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
        )
        store = connect_store(address, self._timeout_s)
        self._group = BroadcastGroup(self._backend, store, self._answer.group, place, timeout_s=self._timeout_s)
        if self._left:
            self._group.close()
        return self._group

    def _receive(self, group: BroadcastGroup) -> None:
        """Receives the buckets; the next one is under way while one is awaited."""
        import torch

        from rollmesh.mesh.weights.broadcast import DEPTH, Staging

        lengths = [bucket.nbytes for bucket in self._bucket_set.buckets]
        on_host = group.device.type == "cpu"
        staging = None if on_host else Staging(group.device, max(lengths))
        under_way = []
        for index in range(len(lengths) + DEPTH - 1):
            if index < len(lengths):
                part = self._bucket_set.part(self._data, index)
                if staging is not None:
                    target = staging.buffer(index, len(part))
                else:
                    target = torch.frombuffer(part, dtype=torch.uint8) if part else torch.empty(0, dtype=torch.uint8)
                under_way.append(group.start_bucket(target))
            done = index - DEPTH + 1
            if done >= 0:
                group.finish_bucket(under_way[done])
                if staging is not None:
                    staging.copy_out(done, self._bucket_set.part(self._data, done))
                self._on_bucket(done)
