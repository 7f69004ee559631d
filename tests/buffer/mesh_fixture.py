"""Small actors for tests: fronts, a learner and generators that speak the real protocol."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np

from rollmesh.buffer.client.client import (
    AdmitStream,
    BufferClient,
    PendingWrite,
    SampleStream,
    SampleUpdate,
    WriteStream,
)
from rollmesh.buffer.client.write_stream import WriteResult
from rollmesh.buffer.redis_backend.acl import ADMIN
from rollmesh.buffer.server.process import BufferFront
from rollmesh.buffer.store.keys import Keys
from rollmesh.buffer.store.payloads import digest_of
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.errors import LostStateError
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.failover_channel import open_mesh
from rollmesh.mesh.rpc.retries import call_with_retry
from rollmesh.mesh.trajectory.payload_codec import Trajectory, encode
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import membership_pb2, membership_pb2_grpc
from rollmesh.protos import trajectory_pb2 as trajectory
from tests.secrets_here import write_secret

# For events that must come, which a busy machine delays; and a term that outlasts it.
TIMEOUT_S = 180.0
LEASE_S = 240.0
# A process starts within.
START_S = 240.0


def make_config(folder: Path, redis: str | None = None, **sections: dict[str, Any]) -> Config:
    """A configuration with small batches (B = 2, n = 2) and short graces."""
    values: dict[str, dict[str, Any]] = {
        "model": {"path": "none"},
        "data": {"train": "none"},
        "run": {"dir": str(folder), "name": f"r{uuid.uuid4().hex[:8]}"},
        "rollout": {"n": 2},
        "learner": {"batch": {"groups": 2}},
        "buffer": {"max_staleness": 1, "redis": redis, "lease_s": LEASE_S, "reconnect_grace_s": 0.3},
    }
    for section, entries in sections.items():
        values[section] = {**values.get(section, {}), **entries}
    values["buffer"] |= _by_file(values["buffer"]["redis"], folder)
    return load_config(values)


def _by_file(url: str | None, folder: Path) -> dict[str, Any]:
    """The login of a tests' server as a configuration takes it: the user in the URL, the password in a file."""
    scheme, owner, rest = (url or "").partition(f"://{ADMIN}:")
    if not owner:
        return {}
    password, _, where = rest.partition("@")
    file = write_secret(folder / "redis.password", password)
    return {"redis": f"{scheme}://{ADMIN}@{where}", "redis_password_file": str(file)}


def make_task(ordinal: int, n: int = 2, pinned: PolicyVersion | None = None) -> trajectory.PromptTask:
    return trajectory.PromptTask(
        task_id=f"task-{ordinal}",
        ordinal=ordinal,
        prompt_ids=np.arange(4, dtype="<i4").tobytes(),
        n=n,
        sampling=trajectory.SamplingParams(temperature=1.0, max_tokens=16),
        pinned=pinned.to_proto() if pinned else None,
    )


def make_write(
    grant: pb.GroupGrant, member: int, versions: list[PolicyVersion], *, reward: float = 1.0
) -> PendingWrite:
    """A scored member whose tokens carry `versions`."""
    count = len(versions)
    runs = VersionRuns.merged((1, version) for version in versions)
    payload = encode(
        Trajectory(np.arange(count, dtype=np.int32), np.full(count, -1, np.float32), np.ones(count, np.uint8), runs)
    )
    meta = trajectory.MemberMeta(
        member=member,
        outcome=trajectory.OUTCOME_SCORED,
        reward=reward,
        prompt_tokens=4,
        response_tokens=count,
        oldest=runs.oldest.to_proto(),
        newest=runs.newest.to_proto(),
    )
    return PendingWrite(head_of_write(grant, meta), payload)


def key_of(front: BufferFront, write: PendingWrite) -> str:
    """Under which the payload of a member lies; in pieces, what their keys begin with."""
    head = write.head
    name = (head.meta.member, head.attempt, digest_of(write.payload))
    return Keys(front.run_name).payload("train", head.group_id, *name)


async def prompts_of(front: BufferFront, ordinal: int, table: str = "train") -> list[bytes]:
    """Keys of the prompts that are stored for an ordinal: one, as a rule."""
    return [key async for key in front.access.scan(f"{Keys(front.run_name).prompt(table, f'{ordinal}:')}*", 100)]


def head_of_write(grant: pb.GroupGrant, meta: trajectory.MemberMeta) -> pb.MemberWrite:
    return pb.MemberWrite(group_id=grant.group_id, lease_id=grant.lease_id, attempt=grant.attempt, meta=meta)


def make_failure(grant: pb.GroupGrant, member: int) -> PendingWrite:
    """A member that could not be scored."""
    meta = trajectory.MemberMeta(member=member, outcome=trajectory.OUTCOME_ERROR, reason="test")
    return PendingWrite(head_of_write(grant, meta))


def refs(groups: list[Any]) -> list[pb.LeaseRef]:
    return [pb.LeaseRef(group_id=g.group_id, lease_id=g.lease_id) for g in groups]


class Log:
    """Groups that the learners of a run have used, as their consumption log has it, and where each of them began."""

    def __init__(self) -> None:
        self.takeovers: dict[int, int] = {}
        self.uses: list[pb.AssertedUse] = []

    def began(self, incarnation: int, version: int) -> None:
        self.takeovers[incarnation] = version
        self.uses = [use for use in self.uses if use.train_version < version]

    def used(self, groups: list[pb.LeasedGroup], version: int) -> None:
        self.uses += [
            pb.AssertedUse(group_id=g.group_id, train_version=version, ordinal=g.task.ordinal) for g in groups
        ]


class HasAddress(Protocol):
    """A front, in this process or another."""

    address: str


class Scene(NamedTuple):
    """A front with a learner, and a generator that holds groups."""

    front: BufferFront
    learner: Learner
    generator: Generator
    admission: AdmitStream
    grants: list[pb.GroupGrant]


class Mesh:
    """Owns what a test starts, and ends it."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        self.redis_url = redis_url
        self.folder = folder
        self._services: list[BufferFront] = []
        self._actors: list[Actor] = []
        self.log = Log()

    async def front(self, config: Config | None = None, port: int = 0, **sections: dict[str, Any]) -> BufferFront:
        service = BufferFront(
            config or make_config(self.folder, self.redis_url, **sections), host="127.0.0.1", port=port
        )
        await service.start()
        self._services.append(service)
        return service

    async def learner(self, front: HasAddress, resume_version: int = 0, **options: Any) -> Learner:
        learner = Learner(front.address, "learner", self.log)
        self._actors.append(learner)
        await learner.agent.start()
        response = await learner.take_over(resume_version, **options)
        learner.incarnation = response.incarnation
        learner.resumed = response
        learner.agent.set_status(incarnation=response.incarnation)
        # A heartbeat of a short term has a short deadline, which a busy machine exceeds.
        await call_with_retry(learner.agent.heartbeat, retry_s=TIMEOUT_S, what="a heartbeat")
        await learner.client.set_policy_version(response.incarnation, resume_version)
        return learner

    async def generator(self, front: HasAddress) -> Generator:
        generator = Generator(front.address, "generator")
        self._actors.append(generator)
        await generator.agent.start()
        return generator

    async def granted(self, count: int = 1, *, seeded: int | None = None, **sections: dict[str, Any]) -> Scene:
        """A generator that was granted `count` of `seeded` groups (all), at version 0 of the first learner."""
        front = await self.front(**sections)
        learner, generator = await self.learner(front), await self.generator(front)
        await learner.seed(1, seeded or count)
        admission = generator.admission()
        admission.update(count, PolicyVersion(1, 0))
        return Scene(front, learner, generator, admission, await generator.grants(admission, count))

    def adopt(self, actor: Actor) -> None:
        """Ends an actor with the others."""
        self._actors.append(actor)

    async def stop_front(self, service: BufferFront) -> None:
        self._services.remove(service)
        await service.stop()

    async def close(self) -> None:
        for actor in self._actors:
            await actor.close()
        for service in self._services:
            await service.stop()


class Actor:
    """A member with a channel and a client."""

    _numbers = itertools.count(1)

    def __init__(self, address: str, role: str) -> None:
        config = make_config(Path())
        # One front is stuck to; several are balanced over, and a hung one is noticed soon.
        self.channel: Any = (
            open_mesh(address, config.security, keepalive_s=0.5)
            if "," in address
            else open_channel(address, config.security)
        )
        self.client = BufferClient(self.channel, timeout_s=5.0, retry_s=TIMEOUT_S)
        self.membership: Any = membership_pb2_grpc.MembershipStub(self.channel)
        self.agent = MembershipAgent(
            self.channel,
            membership_pb2.ROLE_LEARNER if role == "learner" else membership_pb2.ROLE_GENERATOR,
            member_id=f"{role}-{next(self._numbers)}",
            address="127.0.0.1:1",
            host_id="test",
            retry_s=TIMEOUT_S,
        )
        self.streams: list[Any] = []

    async def kill(self) -> None:
        """Disappears without a word, as kill -9 does."""
        await self.agent.stop()
        for stream in self.streams:
            await stream.close()
        await self.channel.close()

    async def close(self) -> None:
        await self.kill()


class Learner(Actor):
    """Seeds, samples, claims, publishes."""

    incarnation = 0
    resumed: pb.ResumeResponse

    def __init__(self, address: str, role: str, log: Log | None = None) -> None:
        super().__init__(address, role)
        self.log = log or Log()
        self.payloads: dict[str, list[bytes]] = {}
        """By group: those of its members that came with the lease."""
        self.version = 0
        self.told: list[tuple[int, int]] = []
        """Answers of Reassert: groups corrected, groups unknown."""
        self.client.on_lost_state = self.tell

    async def tell(self) -> None:
        """Repeats the report of used groups until the buffer has taken it."""
        incarnation = self.incarnation or max(self.log.takeovers)
        takeovers = [pb.Takeover(incarnation=i, resumed_at=k) for i, k in sorted(self.log.takeovers.items())]
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                try:
                    answer = await self.client.reassert(
                        incarnation, self.agent.member_id, self.version, 0, "", takeovers, self.log.uses
                    )
                    self.told.append(answer)
                    return
                except LostStateError:
                    await asyncio.sleep(0.05)

    async def mended(self, step: Callable[[], Awaitable[Any]]) -> Any:
        """A step, repeated where Redis has lost state."""
        while True:
            try:
                return await step()
            except LostStateError:
                await self.tell()

    async def take_over(self, version: int, **options: Any) -> pb.ResumeResponse:
        me = self.agent.member_id
        response = await self.mended(lambda: self.client.resume("train", me, version, **options))
        self.log.began(response.incarnation, version)
        self.version = version
        return cast("pb.ResumeResponse", response)

    async def seed(self, first: int, last: int, **options: Any) -> pb.SeedResponse:
        tasks = [make_task(ordinal) for ordinal in range(first, last + 1)]
        return cast(
            "pb.SeedResponse",
            await self.mended(lambda: self.client.seed("train", self.incarnation, tasks, **options)),
        )

    def sampler(self, table: str = "train", *, with_payloads: bool = True) -> SampleStream:
        stream = self.client.sample(table, self.incarnation, with_payloads=with_payloads)
        self.streams.append(stream)
        return stream

    async def batch(self, stream: SampleStream, count: int, version: int) -> list[pb.LeasedGroup]:
        """Asks for a batch and waits for all of it (or the end of the data)."""
        stream.request(count, version)
        return await self.collect(stream, count)

    async def collect(self, stream: SampleStream, count: int) -> list[pb.LeasedGroup]:
        groups: list[pb.LeasedGroup] = []
        async with asyncio.timeout(TIMEOUT_S):
            while len(groups) < count:
                response = await stream.next(TIMEOUT_S)
                assert response is not None, stream.waiting_reason
                groups += self.taken(response)
                if response.exhausted:
                    break
        return groups

    def taken(self, response: SampleUpdate) -> list[pb.LeasedGroup]:
        """The groups of a response; their payloads are kept in `payloads`."""
        for arrived in response.groups:
            self.payloads[arrived.leased.group_id] = [bytes(payload) for payload in arrived.payloads]
        return [arrived.leased for arrived in response.groups]

    async def train(self, groups: list[pb.LeasedGroup], version: int) -> pb.ClaimResponse:
        """Claims a batch and publishes the next version."""
        response = await self.mended(lambda: self.client.claim("train", self.incarnation, version, refs(groups)))
        if response.claimed:
            self.log.used(groups, version)
            self.version = version + 1
            await self.client.set_policy_version(self.incarnation, version + 1)
        return cast("pb.ClaimResponse", response)


class Generator(Actor):
    """Admits groups and writes members."""

    def admission(self, table: str = "train") -> AdmitStream:
        stream = self.client.admit(table, self.agent.member_id, lambda: self.agent.generation)
        self.streams.append(stream)
        return stream

    def writer(self, table: str = "train") -> WriteStream:
        stream = self.client.writer(table, self.agent.member_id, lambda: self.agent.generation)
        self.streams.append(stream)
        return stream

    async def grants(self, stream: AdmitStream, count: int) -> list[pb.GroupGrant]:
        async with asyncio.timeout(TIMEOUT_S):
            return [await anext(stream) for _ in range(count)]

    async def finish(
        self, writer: WriteStream, grants: list[pb.GroupGrant], version: PolicyVersion
    ) -> list[WriteResult]:
        """Writes all missing members of the groups, sampled at one version."""
        writes = [
            make_write(grant, member, [version] * 5)
            for grant in grants
            for member in range(grant.task.n)
            if member not in grant.members_done
        ]
        async with asyncio.timeout(TIMEOUT_S):
            return await writer.write(writes)


async def nothing_within(awaitable: Any, seconds: float = 0.3) -> bool:
    """True where an awaitable stays pending; it is cancelled."""
    try:
        async with asyncio.timeout(seconds):
            await awaitable
    except TimeoutError:
        return True
    return False
