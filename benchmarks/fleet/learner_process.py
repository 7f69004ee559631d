"""A scripted learner: seeds prompts, leases, claims, publishes versions and commits, through the real client alone.

It sends its incarnation when it has taken the run over. Then it takes commands over its pipe: `begin`, `measured` and
`end`, which is answered with the ledger.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import uvloop

from benchmarks.fleet.pipes import receive
from benchmarks.fleet.scenario import Scenario
from benchmarks.fleet.simulated_generator import RETRY_S, TIMEOUT_S
from rollmesh.buffer.client.client import BufferClient, ReceivedGroup
from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.rpc.failover_channel import open_mesh
from rollmesh.mesh.runtime.memory_tuning import freeze_heap, keep_freed_memory
from rollmesh.mesh.tables import TABLES, TRAIN
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import membership_pb2
from rollmesh.protos import trajectory_pb2 as trajectory

_PROMPT_TOKENS = 64
# Batches asked for ahead of the claim, and claims per commit.
_AHEAD = 3
_COMMIT_EVERY = 4
# A batch's groups may take as long as the slowest generator needs.
_NEXT_S = 120.0
_SEEDED_AT_ONCE = 1000
# Seconds within which it hears that it is to end.
_LOOK_S = 0.5


class ScriptedLearner:
    """Trains in no time: it claims a batch as soon as its groups are there.

    Args:
        scenario: of the cell.
        client: of the buffer.
        incarnation: of this learner.

    Attributes:
        ending: set to end after the present batch.
    """

    def __init__(self, scenario: Scenario, client: BufferClient, incarnation: int) -> None:
        self._scenario = scenario
        self._client = client
        self._incarnation = incarnation
        self._held: deque[ReceivedGroup] = deque()
        self._stream = client.sample(TRAIN, incarnation)
        self._stream.holdings = lambda: [group.lease for group in self._held]
        self._seeded = 0
        self._version = 0
        self._claimed_groups = 0
        self._queued_ms, self._came_s = array("d"), array("d")
        self._trajectories = self._groups = 0
        self.ending = False

    async def seed(self, count: int) -> None:
        """Adds prompt tasks."""
        ids = np.arange(_PROMPT_TOKENS, dtype="<i4").tobytes()
        for start in range(0, count, _SEEDED_AT_ONCE):
            portion = range(self._seeded + 1, self._seeded + 1 + min(_SEEDED_AT_ONCE, count - start))
            tasks = [
                trajectory.PromptTask(
                    task_id=f"task-{ordinal}",
                    ordinal=ordinal,
                    prompt_ids=ids,
                    n=self._scenario.n,
                    sampling=trajectory.SamplingParams(temperature=1.0, max_tokens=self._scenario.lengths.most),
                )
                for ordinal in portion
            ]
            self._seeded = portion[-1]
            await self._client.seed(TRAIN, self._incarnation, tasks)

    def pop_measured(self) -> dict[str, Any]:
        """Measurements since the last call."""
        found = {
            "trajectories": self._trajectories,
            "groups": self._groups,
            "queued_ms": self._queued_ms,
            "came_s": self._came_s,
            "version": self._version,
        }
        self._trajectories = self._groups = 0
        self._queued_ms, self._came_s = array("d"), array("d")
        return found

    async def run(self) -> None:
        """Trains until told to end."""
        size = self._scenario.groups_per_step
        for version in range(_AHEAD):
            self._stream.request(size, version)
        upkeep: asyncio.Task[None] | None = None
        while not self.ending:
            if not await self._fill_batch(size):
                break
            batch = [self._held[position].leased for position in range(size)]
            leases = [pb.LeaseRef(group_id=group.group_id, lease_id=group.lease_id) for group in batch]
            answer = await self._client.claim(TRAIN, self._incarnation, self._version, leases)
            if not answer.claimed:
                # As a learner does that was away for long: others come in their place.
                before = len(self._held)
                self._drop({(refused.group_id, refused.lease_id) for refused in answer.refused})
                self._stream.request(before - len(self._held), self._version)
                continue
            for _ in range(size):
                self._held.popleft()
            self._claimed_groups += size
            self._version += 1
            self._stream.request(size, self._version + _AHEAD - 1)
            if upkeep is not None:
                await upkeep
            upkeep = asyncio.create_task(self._keep_up(size))
        if upkeep is not None:
            await upkeep

    async def _fill_batch(self, size: int) -> bool:
        """Waits until a batch is here; False where it is told to end instead."""
        until = time.monotonic() + _NEXT_S
        while len(self._held) < size:
            update = await self._stream.next(_LOOK_S)
            if update is not None:
                until = time.monotonic() + _NEXT_S
                self._take(update.groups, {(lost.group_id, lost.lease_id) for lost in update.lost})
            elif self.ending:
                return False
            elif time.monotonic() > until:
                raise TimeoutError(f"no group for {_NEXT_S:.0f} s: {self._stream.waiting_reason}")
        return True

    async def ledger(self) -> list[str]:
        """Disagreements in the ledgers, and with the number of groups that this learner has claimed."""
        wrong: list[str] = []
        for table in TABLES:
            answer = await self._client.ledger(table)
            wrong += answer.discrepancies
            used = answer.counters.trained + answer.counters.consumed
            if table == TRAIN and used != self._claimed_groups:
                wrong.append(f"{self._claimed_groups} groups were claimed, the ledger has {used}")
        return wrong

    def _take(self, groups: Sequence[ReceivedGroup], lost: set[tuple[str, str]]) -> None:
        now_ns = time.time_ns()
        self._drop(lost)
        for group in groups:
            self._held.append(group)
            members = group.leased.members
            self._groups += 1
            self._trajectories += len(members)
            self._queued_ms.append(group.leased.queued_ms)
            self._came_s.append((now_ns - max(meta.finished_unix_ns for meta in members)) * 1e-9)

    def _drop(self, lost: set[tuple[str, str]]) -> None:
        if lost:
            kept = [group for group in self._held if (group.leased.group_id, group.leased.lease_id) not in lost]
            self._held = deque(kept)

    async def _keep_up(self, count: int) -> None:
        """Publishes, seeds and, at times, commits, as a learner does after its step."""
        await self._client.set_policy_version(self._incarnation, self._version)
        await self.seed(count)
        if self._version % _COMMIT_EVERY == 0:
            await self._client.commit(TRAIN, self._incarnation, self._version, "fleet")


def run(conn: Connection, scenario: Scenario, mesh: str, security: SecuritySection) -> None:
    """The process."""
    logging.basicConfig(level=logging.ERROR)
    keep_freed_memory()

    async def main() -> None:
        channel = open_mesh(mesh, security, Identity(Role.LEARNER, "learner-1"))
        agent = MembershipAgent(
            channel, membership_pb2.ROLE_LEARNER, member_id="learner-1", address="127.0.0.1:1", host_id="fleet",
            timeout_s=TIMEOUT_S, retry_s=RETRY_S,
        )  # fmt: skip
        await agent.start()
        client = BufferClient(channel, timeout_s=TIMEOUT_S, retry_s=RETRY_S)
        resumed = await client.resume(TRAIN, agent.member_id, 0)
        agent.set_status(incarnation=resumed.incarnation)
        await agent.heartbeat()
        await client.set_policy_version(resumed.incarnation, 0)
        learner = ScriptedLearner(scenario, client, resumed.incarnation)
        freeze_heap()
        conn.send(resumed.incarnation)
        await receive(conn)
        # Enough for every slot of the fleet, and the batches ahead.
        slots = scenario.generators * scenario.slots // scenario.n
        await learner.seed(4 * slots + 8 * scenario.groups_per_step)
        conn.send(None)
        work = asyncio.create_task(learner.run())
        while True:
            message = asyncio.create_task(receive(conn))
            await asyncio.wait({work, message}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            if (await message)[0] == "measured":
                conn.send(learner.pop_measured())
                continue
            learner.ending = True
            await work
            conn.send(await learner.ledger())
            return

    uvloop.run(main())
