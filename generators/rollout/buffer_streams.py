"""A generator's streams to the buffer, and the release of groups.

Invariants: the buffer knows the present credits and version of each table as soon as they have changed. Changes of one
turn of the event loop travel together, and nothing is sent where nothing changed. Groups that the buffer cancels are
dropped at once. A group is reported as held for as long as the rollout loop has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rollmesh.buffer.client.client import AdmitStream, BufferClient, WriteStream
from rollmesh.generators.rollout.active_group import ActiveGroup
from rollmesh.generators.rollout.rollout_manager import RolloutManager
from rollmesh.mesh.errors import RollmeshError
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.runtime.background_tasks import BackgroundTasks, log_errors
from rollmesh.mesh.runtime.task_group import run_together
from rollmesh.mesh.tables import TABLES, TRAIN
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2, trajectory_pb2

log = logging.getLogger(__name__)


class _Known(NamedTuple):
    """The state of this generator as the buffer knows it.

    Attributes:
        credits: left, as far as we know.
        serving: the version.
        decodes: responses of the table; its wait at the gate counts only where it decodes none.
    """

    credits: int
    serving: PolicyVersion | None
    decodes: bool


class AdmissionLoop:
    """Keeps one Admit stream per table and feeds its grants to the rollout loop."""

    def __init__(self, client: BufferClient, agent: MembershipAgent, rollout: RolloutManager) -> None:
        self._client = client
        self._agent = agent
        self._rollout = rollout
        self._serving: PolicyVersion | None = None
        self._streams: dict[str, AdmitStream] = {}
        # The state that the buffer knows, by table.
        self._announced = dict.fromkeys(TABLES, _Known(0, None, decodes=False))
        self._update_scheduled = False

    def set_serving(self, version: PolicyVersion) -> None:
        """Records the version that is in service from now on."""
        self._serving = version
        self.refresh()

    def refresh(self) -> None:
        """Sends credits that may have changed."""
        if not self._update_scheduled and self._streams:
            self._update_scheduled = True
            asyncio.get_running_loop().call_soon(self._send_updates)

    async def run(self) -> None:
        """Accepts grants until cancelled.

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
            await run_together(*(self._accept_grants(table) for table in TABLES))
        finally:
            await self.close()

    async def close(self) -> None:
        """Closes the streams; leases last for the reconnect grace alone from now on."""
        streams, self._streams = self._streams, {}
        await asyncio.gather(*(stream.close() for stream in streams.values()))

    def waiting_reason(self) -> str:
        """The reason why nothing is granted for training at present."""
        stream = self._streams.get(TRAIN)
        return stream.waiting_reason if stream is not None else "waits for its first weights"

    async def _accept_grants(self, table: str) -> None:
        async for grant in self._streams[table]:
            known = self._announced[table]
            self._announced[table] = _Known(max(0, known.credits - 1), known.serving, decodes=True)
            self._rollout.add(table, grant)

    def _send_updates(self) -> None:
        self._update_scheduled = False
        for table, stream in self._streams.items():
            capacity = self._rollout.capacity
            outstanding = capacity.outstanding(table)
            update = _Known(capacity.credits(table), self._serving, decodes=outstanding > 0)
            if update != self._announced[table]:
                self._announced[table] = update
                # A stream that has ended for good raises here, and again in `_accept_grants`, where it counts.
                with contextlib.suppress(RollmeshError):
                    stream.update(credits=update.credits, serving=update.serving, outstanding=outstanding)


class LeaseReleaser:
    """Releases groups, in the background."""

    def __init__(self, client: BufferClient, agent: MembershipAgent, rollout: RolloutManager) -> None:
        self._client = client
        self._agent = agent
        self._rollout = rollout
        self._tasks = BackgroundTasks(log_errors(log))

    def release(self, groups: Sequence[ActiveGroup]) -> None:
        """Sends a release to the buffer; members stored so far stay."""
        self._tasks.spawn(self._send(groups), "releasing groups")

    async def drained(self) -> None:
        """Waits until all releases have been sent."""
        while len(self._tasks):
            await self._tasks.drain()

    def close(self) -> None:
        """Cancels releases that are under way."""
        self._tasks.cancel()

    async def _send(self, groups: Sequence[ActiveGroup]) -> None:
        by_table: dict[str, list[buffer_pb2.LeaseRef]] = {}
        for group in groups:
            by_table.setdefault(group.table, []).append(group.lease)
        try:
            for table, leases in by_table.items():
                await self._send_table(table, leases)
        finally:
            self._rollout.on_released(groups)

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

    def writer(self, table: str) -> WriteStream:
        """The table's writer."""
        writer = self._writers.get(table)
        if writer is None:
            writer = self._client.writer(table, self._agent.member_id, lambda: self._agent.generation)
            self._writers[table] = writer
        return writer

    async def upload_side(
        self, table: str, grant: buffer_pb2.GroupGrant, member: int, name: str, data: bytes | NDArray[np.generic]
    ) -> trajectory_pb2.SideData:
        """Stores an array, or bytes, that belong to a member; see `BufferClient.upload_side`."""
        return await self._client.upload_side(table, grant, member, name, data)

    async def close(self) -> None:
        """Closes the streams; unanswered writes are abandoned."""
        await asyncio.gather(*(writer.close() for writer in self._writers.values()))
