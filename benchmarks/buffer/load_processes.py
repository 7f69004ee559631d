"""A writer and a learner as processes of their own, through the public client alone.

Each answers its parent over a pipe: `up` when it has joined, then its results once it was told to end. Time stamps are
`time.time()`, which processes of one machine share.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import uvloop

from benchmarks.buffer.arrays import DISTINCT, make_arrays
from benchmarks.buffer.plan import Plan
from benchmarks.fleet.pipes import receive
from rollmesh.buffer.client.client import BufferClient, Lease, PendingWrite, ReceivedGroup, WriteStream
from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.runtime.memory_tuning import freeze_heap, keep_freed_memory
from rollmesh.mesh.trajectory.payload_codec import Trajectory, decode, encode
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import membership_pb2
from rollmesh.protos import trajectory_pb2 as proto

TABLE = "train"
PROMPT_TOKENS = 64
_TIMEOUT_S = 10.0
# Trajectories that a writer has in flight at most.
_WINDOW = 512
# Tasks seeded by one call, and batches asked for ahead, when the table is filled first.
_SEEDED_AT_ONCE = 2000
_REQUESTED = 3


async def _join(
    address: str, security: SecuritySection, role: membership_pb2.Role, name: str
) -> tuple[BufferClient, MembershipAgent]:
    caller = Role.LEARNER if role == membership_pb2.ROLE_LEARNER else Role.GENERATOR
    channel = open_channel(address, security, Identity(caller, name))
    agent = MembershipAgent(channel, role, member_id=name, address="127.0.0.1:1", host_id="benchmark")
    await agent.start()
    return BufferClient(channel, timeout_s=_TIMEOUT_S, retry_s=30.0), agent


def trajectories(tokens: int, incarnation: int) -> list[Trajectory]:
    """The trajectories that a writer stores again and again."""
    found = []
    for seed in range(DISTINCT):
        arrays = make_arrays(tokens, seed)
        half = tokens // 2
        runs = ((half, PolicyVersion(incarnation, 0)), (tokens - half, PolicyVersion(incarnation, 1)))
        found.append(Trajectory(arrays["ids"], arrays["log_probs"], arrays["mask"], VersionRuns(runs)))
    return found


def member(grant: pb.GroupGrant, index: int, item: Trajectory) -> PendingWrite:
    """A scored member; `finished_unix_ns` is the moment at which storing it began."""
    runs = item.versions.runs
    head = pb.MemberWrite(
        group_id=grant.group_id,
        lease_id=grant.lease_id,
        attempt=grant.attempt,
        meta=proto.MemberMeta(
            finished_unix_ns=time.time_ns(),
            member=index,
            outcome=proto.OUTCOME_SCORED,
            reward=1.0,
            finish_reason=proto.FINISH_REASON_STOP,
            prompt_tokens=PROMPT_TOKENS,
            response_tokens=len(item.response_ids),
            oldest=runs[0][1]._asdict(),
            newest=runs[-1][1]._asdict(),
            generator="benchmark",
        ),
    )
    return PendingWrite(head, encode(item))


class _Producer:
    """Writes a group for every grant, at a pace or as fast as acknowledgements come."""

    def __init__(self, plan: Plan, client: BufferClient, agent: MembershipAgent, incarnation: int) -> None:
        self._plan = plan
        self._items = trajectories(plan.tokens, incarnation)
        self._serving = PolicyVersion(incarnation, 1)
        self._admission = client.admit(TABLE, agent.member_id, lambda: agent.generation)
        self._held: set[Lease] = set()
        self._admission.holdings = lambda: self._held
        self._writer: WriteStream = client.writer(TABLE, agent.member_id, lambda: agent.generation)
        self._tasks: set[asyncio.Task[None]] = set()
        self._window = max(2, _WINDOW // plan.group)
        self._credits = self._outstanding = 0
        self.written = 0

    def _ask(self) -> None:
        """States credits when a good part of the window is free."""
        free = self._window - self._outstanding - self._credits
        if free >= self._window // 4:
            self._credits += free
            self._admission.update(self._credits, self._serving)

    async def _group(self, grant: pb.GroupGrant) -> None:
        first = self.written
        self.written += self._plan.group
        members = [member(grant, i, self._items[(first + i) % DISTINCT]) for i in range(self._plan.group)]
        results = await self._writer.write(members)
        assert all(r.status == pb.WRITE_STATUS_STORED for r in results), results[0]
        self._held.discard(Lease.of(grant))
        self._outstanding -= 1
        self._ask()

    async def run(self) -> None:
        self._ask()
        pause = self._plan.writers * self._plan.group / self._plan.rate if self._plan.rate else 0.0
        due = time.perf_counter()
        async for grant in self._admission:
            self._held.add(Lease.of(grant))
            self._credits -= 1
            self._outstanding += 1
            if pause:
                due = max(due + pause, time.perf_counter() - pause)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
            task = asyncio.create_task(self._group(grant))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


def writer(conn: Connection, address: str, security: SecuritySection, plan: Plan, number: int) -> None:
    """A generator process; the parent sends the incarnation to start, and anything to end."""

    keep_freed_memory()  # as generators do

    async def main() -> None:
        client, agent = await _join(address, security, membership_pb2.ROLE_GENERATOR, f"generator-{number}")
        freeze_heap()
        conn.send("up")
        producer = _Producer(plan, client, agent, await receive(conn))
        work = asyncio.create_task(producer.run())
        message = asyncio.create_task(receive(conn))
        await asyncio.wait({work, message}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
        work.cancel()
        conn.send(producer.written)

    uvloop.run(main())


class _Consumer:
    """Seeds a bounded window, takes batches, claims them, commits."""

    def __init__(self, plan: Plan, client: BufferClient, incarnation: int, counter: Any) -> None:
        self._plan = plan
        self._client = client
        self._incarnation = incarnation
        self._counter = counter
        self._held: deque[ReceivedGroup] = deque()
        self._stream = client.sample(TABLE, incarnation)
        self._stream.holdings = lambda: [group.lease for group in self._held]
        self._seeded = 0
        self.version = 1
        # Per trajectory: when it came, and how long it took; arrays, since a million tuples would be seen in the rate.
        self.came, self.took = array("d"), array("d")
        self.claims: list[tuple[float, int]] = []
        self.claimed = 0
        self.payload_bytes = 0
        self.ending = False

    async def seed(self, count: int) -> None:
        ids = np.arange(PROMPT_TOKENS, dtype="<i4").tobytes()
        tasks = [
            proto.PromptTask(
                task_id=f"task-{ordinal}",
                ordinal=ordinal,
                prompt_ids=ids,
                n=self._plan.group,
                sampling=proto.SamplingParams(temperature=1.0, max_tokens=self._plan.tokens),
            )
            for ordinal in range(self._seeded + 1, self._seeded + count + 1)
        ]
        self._seeded += count
        await self._client.seed(TABLE, self._incarnation, tasks)

    def _decode_payloads(self, groups: Any) -> None:
        """Decodes every payload, as a learner rank does."""
        now = time.time()
        for group in groups:
            for meta, payload in zip(group.leased.members, group.payloads, strict=True):
                assert len(decode(payload).response_ids) == self._plan.tokens
                self.came.append(now)
                self.took.append(now - meta.finished_unix_ns * 1e-9)
            self.payload_bytes = len(group.payloads[0])

    async def fill(self) -> dict[str, float]:
        """Seeds what is to be ahead and waits until it is ready; how long that took, and the bytes stored."""
        began, total = time.perf_counter(), self._plan.ahead * self._plan.groups_per_step
        for start in range(0, total, _SEEDED_AT_ONCE):
            await self.seed(min(_SEEDED_AT_ONCE, total - start))
        # The sum of others' writes offers no event to wait for; the parent's deadline bounds this loop.
        while (state := await self._client.describe(TABLE)).counts.ready < total:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return {"seconds": time.perf_counter() - began, "payload_bytes": state.bytes}

    async def run(self) -> None:
        plan, size = self._plan, self._plan.groups_per_step
        ahead = _REQUESTED if plan.fill else max(2, plan.ahead - 2)
        for version in range(1, 1 + ahead):
            self._stream.request(size, version)
        if not plan.fill:
            await self.seed(plan.ahead * size)
        held = self._held
        pending: set[asyncio.Task[Any]] = set()
        while not self.ending:
            while len(held) < size:
                response = await self._stream.next(_TIMEOUT_S)
                if response is None:
                    raise TimeoutError(f"no group for {_TIMEOUT_S:.0f} s: {self._stream.waiting_reason}")
                self._decode_payloads(response.groups)
                held.extend(response.groups)
            batch = [held[position].leased for position in range(size)]
            leases = [pb.LeaseRef(group_id=group.group_id, lease_id=group.lease_id) for group in batch]
            answer = await self._client.claim(TABLE, self._incarnation, self.version, leases)
            assert answer.claimed, answer.refused[0]
            for _ in range(size):
                held.popleft()
            self.claimed += size * plan.group
            self.claims.append((time.time(), self.claimed))
            self._counter.value += 1
            self.version += 1
            self._stream.request(size, self.version + ahead - 1)
            work = [self.seed(size)]
            if self.version % plan.commit_every == 0:
                work.append(self._commit())
            # One round of upkeep at a time: the next claim continues meanwhile.
            if pending:
                await asyncio.gather(*pending)
            pending = {asyncio.create_task(job) for job in work}
        await asyncio.gather(*pending)

    async def _commit(self) -> None:
        await self._client.commit(TABLE, self._incarnation, self.version, "benchmark")


def learner(conn: Connection, address: str, security: SecuritySection, plan: Plan, claims: Any) -> None:
    """The learner process: sends its incarnation, begins and ends when told, sends its results; `claims` counts."""

    keep_freed_memory()  # as learners do

    async def main() -> None:
        client, agent = await _join(address, security, membership_pb2.ROLE_LEARNER, "learner-1")
        freeze_heap()
        resumed = await client.resume(TABLE, agent.member_id, 0)
        agent.set_status(incarnation=resumed.incarnation)
        await agent.heartbeat()
        # Trajectories carry versions 0 and 1, so version 1 is in force from the start.
        await client.set_policy_version(resumed.incarnation, 1)
        conn.send(resumed.incarnation)
        consumer = _Consumer(plan, client, resumed.incarnation, claims)
        if plan.fill:
            conn.send(await consumer.fill())
            await receive(conn)
        work = asyncio.create_task(consumer.run())
        message = asyncio.create_task(receive(conn))
        await asyncio.wait({work, message}, return_when=asyncio.FIRST_COMPLETED)
        # To the end of the round, so that what was claimed can be compared with the ledger.
        consumer.ending = True
        await work
        ledger = await client.ledger(TABLE)
        conn.send(
            {
                "claims": consumer.claims,
                "came": consumer.came,
                "took": consumer.took,
                "claimed": consumer.claimed,
                "payload_bytes": consumer.payload_bytes,
                "discrepancies": list(ledger.discrepancies),
                "used": ledger.counters.trained + ledger.counters.consumed,
            }
        )

    uvloop.run(main())
