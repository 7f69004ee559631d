"""What a generator says to the buffer: its standing streams, and the groups that it gives back.

Invariant: the buffer knows the present credits and version of each table as soon as they have changed; changes of one
turn of the event loop travel together, and nothing is sent where nothing changed. What the buffer cancels is dropped as
soon as it says so. The buffer is told that a group is held for as long as it stands in the book of the rollout loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rollmesh.buffer.client.client import AdmitStream, BufferClient, WriteStream
from rollmesh.generators.rollout.active_group import ActiveGroup
from rollmesh.generators.rollout.rollout_manager import RolloutManager
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.runtime.task_group import run_together
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2, trajectory_pb2

log = logging.getLogger(__name__)
TABLES = ("train", "eval")


class AdmissionLoop:
    """Keeps one Admit stream per table and feeds its grants to the rollout loop."""

    def __init__(self, client: BufferClient, agent: MembershipAgent, rollout: RolloutManager) -> None:
        self._client = client
        self._agent = agent
        self._rollout = rollout
        self._serving: PolicyVersion | None = None
        self._streams: dict[str, AdmitStream] = {}
        # Per table: the credits that the buffer has left as far as we know, and the version it was told.
        self._told: dict[str, tuple[int, PolicyVersion | None]] = dict.fromkeys(TABLES, (0, None))
        self._telling = False

    def serve(self, version: PolicyVersion) -> None:
        """From now on this version is in service."""
        self._serving = version
        self.refresh()

    def refresh(self) -> None:
        """The load may have changed."""
        if not self._telling and self._streams:
            self._telling = True
            asyncio.get_running_loop().call_soon(self._tell)

    async def run(self) -> None:
        """Takes grants until cancelled.

        Raises:
            UnreachableError: the buffer stayed away for too long.
        """
        for table in TABLES:
            stream = self._client.admit(table, self._agent.member_id, lambda: self._agent.generation)
            stream.on_cancelled = partial(self._rollout.cancel, table)
            stream.holdings = partial(self._rollout.leases, table)
            self._streams[table] = stream
        try:
            self.refresh()
            await run_together(*(self._take(table) for table in TABLES))
        finally:
            await self.close()

    async def close(self) -> None:
        """Closes the streams; what is held is held for the reconnect grace only from now on."""
        streams, self._streams = self._streams, {}
        await asyncio.gather(*(stream.close() for stream in streams.values()))

    def waiting_reason(self) -> str:
        """Why nothing is granted for training at present."""
        stream = self._streams.get("train")
        return stream.waiting_reason if stream is not None else "waits for its first weights"

    async def _take(self, table: str) -> None:
        async for grant in self._streams[table]:
            credits_left, version = self._told[table]
            self._told[table] = (max(0, credits_left - 1), version)
            self._rollout.add(table, grant)

    def _tell(self) -> None:
        self._telling = False
        for table, stream in self._streams.items():
            wanted = (self._rollout.credits(table), self._serving)
            if wanted != self._told[table]:
                self._told[table] = wanted
                # A stream that has ended for good raises here and, for everybody to see, in `_take`.
                with contextlib.suppress(RollmeshError):
                    outstanding = self._rollout.outstanding(table)
                    stream.update(credits=wanted[0], serving=wanted[1], outstanding=outstanding)


class LeaseReleaser:
    """Gives groups back, in the background."""

    def __init__(self, client: BufferClient, agent: MembershipAgent, rollout: RolloutManager) -> None:
        self._client = client
        self._agent = agent
        self._rollout = rollout
        self._tasks: set[asyncio.Task[None]] = set()

    def release(self, groups: Sequence[ActiveGroup]) -> None:
        """Tells the buffer; members stored so far stay."""
        task = asyncio.get_running_loop().create_task(self._send(groups))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def sent(self) -> None:
        """Waits until the buffer has been told of all."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def close(self) -> None:
        """Gives up what is under way."""
        for task in self._tasks:
            task.cancel()

    async def _send(self, groups: Sequence[ActiveGroup]) -> None:
        by_table: dict[str, list[buffer_pb2.LeaseRef]] = {}
        for group in groups:
            by_table.setdefault(group.table, []).append(group.lease)
        try:
            for table, leases in by_table.items():
                await self._send_table(table, leases)
        finally:
            self._rollout.released(groups)

    async def _send_table(self, table: str, leases: Sequence[buffer_pb2.LeaseRef]) -> None:
        try:
            await self._client.release(table, self._agent.member_id, self._agent.generation, leases)
        except RollmeshError as error:
            log.warning("%d leases of %s end when they are not named: %s", len(leases), table, error.message)


class WriteStreams:
    """Stores members: one write stream per table, opened at the first write."""

    def __init__(self, client: BufferClient, agent: MembershipAgent) -> None:
        self._client = client
        self._agent = agent
        self._writers: dict[str, WriteStream] = {}

    def of(self, table: str) -> WriteStream:
        """The table's writer."""
        writer = self._writers.get(table)
        if writer is None:
            writer = self._client.writer(table, self._agent.member_id, lambda: self._agent.generation)
            self._writers[table] = writer
        return writer

    async def upload_side(
        self, table: str, grant: buffer_pb2.GroupGrant, member: int, name: str, array: NDArray[np.generic]
    ) -> trajectory_pb2.SideData:
        """Stores a large array that belongs to a member; see `BufferClient.upload_side`."""
        return await self._client.upload_side(table, grant, member, name, array)

    async def close(self) -> None:
        """Closes the streams; unanswered writes are given up."""
        await asyncio.gather(*(writer.close() for writer in self._writers.values()))
