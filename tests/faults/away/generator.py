"""A scripted generator: it finishes as many of the groups that it holds as it is allowed to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rollmesh.buffer.client.client import Lease
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import membership_pb2
from tests.buffer.mesh_fixture import make_write
from tests.faults.away.member import Member, say


class Generator(Member):
    """Holds what it is granted, and finishes groups in the order of their grants while it is allowed to."""

    def __init__(self, run: str, name: str, mesh: str, most: int) -> None:
        super().__init__(mesh, membership_pb2.ROLE_GENERATOR, name)
        self._run, self._name, self._most = run, name, most
        self._held: dict[str, pb.GroupGrant] = {}
        self._allowed = 0
        self._changed = asyncio.Event()

    async def start(self) -> None:
        await self.agent.start()
        self._admission = self.client.admit("train", self.agent.member_id, lambda: self.agent.generation)
        self._admission.on_cancelled = self._cancelled
        self._admission.holdings = lambda: [Lease.of(held) for held in self._held.values()]
        self._writer = self.client.writer("train", self.agent.member_id, lambda: self.agent.generation)
        self.agent.on_change(self._told)
        self._tasks = [asyncio.create_task(self._take()), asyncio.create_task(self._work())]
        self._tell()

    def allow(self, groups: int) -> None:
        """Allows it to finish that many more groups."""
        self._allowed = groups
        self._changed.set()

    def _told(self) -> None:
        """There may be a policy again, without which nothing is worked on."""
        self._changed.set()
        self._tell()

    def _tell(self) -> None:
        held = len(self._held)
        self._admission.update(self._most - held, self.agent.policy, held)

    def _cancelled(self, leases: Sequence[pb.LeaseRef]) -> None:
        for lease in leases:
            held = self._held.get(lease.group_id)
            if held is not None and held.lease_id == lease.lease_id:
                del self._held[lease.group_id]
        self._tell()

    async def _take(self) -> None:
        async for grant in self._admission:
            self._held[grant.group_id] = grant
            self._changed.set()

    async def _work(self) -> None:
        while True:
            policy = self.agent.policy
            if not self._allowed or not self._held or policy is None:
                self._changed.clear()
                await self._changed.wait()
                continue
            grant = next(iter(self._held.values()))
            missing = [member for member in range(grant.task.n) if member not in grant.members_done]
            results = await self._writer.write([make_write(grant, member, [policy] * 3) for member in missing])
            if self._held.get(grant.group_id) is grant:
                del self._held[grant.group_id]
            # A group that others hold by now does not count.
            if all(result.status != pb.WRITE_STATUS_SUPERSEDED for result in results):
                self._allowed = max(0, self._allowed - 1)
                say(self._run, "finished", by=self._name, group=grant.group_id)
            self._tell()
