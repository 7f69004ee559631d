"""A buffer, and a script in place of a generator that answers evaluation groups."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from rollmesh.buffer.client.client import BufferClient, PendingWrite
from rollmesh.buffer.server.process import BufferFront
from rollmesh.mesh.config import load_config
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.trajectory.payload_codec import Trajectory, encode
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns
from rollmesh.protos import buffer_pb2, membership_pb2, trajectory_pb2

V0, V1, V2 = (PolicyVersion(1, version) for version in range(3))


class Mesh:
    """A buffer, its client, and a generator that answers with the task's row as reward."""

    def __init__(self, client: BufferClient, agent: MembershipAgent, address: str) -> None:
        self.client = client
        self._agent = agent
        self.address = address

    async def answer(self, serving: PolicyVersion, count: int) -> None:
        """Takes `count` evaluation groups and writes their members; odd members end in error."""
        grants = self.client.admit("eval", self._agent.member_id, self._agent.generation)
        writer = self.client.writer("eval", self._agent.member_id, self._agent.generation)
        grants.update(count, serving)
        try:
            done = 0
            async for grant in grants:
                await writer.write([_member(grant, index, serving) for index in range(grant.task.n)])
                done += 1
                if done == count:
                    return
        finally:
            await grants.close()
            await writer.close()

    async def give_back(self, serving: PolicyVersion, count: int) -> None:
        """Takes `count` evaluation groups and releases them, as a generator does whose weights have just changed."""
        grants = self.client.admit("eval", self._agent.member_id, self._agent.generation)
        grants.update(count, serving)
        try:
            taken = [await anext(aiter(grants)) for _ in range(count)]
            leases = [buffer_pb2.LeaseRef(group_id=each.group_id, lease_id=each.lease_id) for each in taken]
            await self.client.release("eval", self._agent.member_id, self._agent.generation, leases)
        finally:
            await grants.close()


def _member(grant: buffer_pb2.GroupGrant, index: int, serving: PolicyVersion) -> PendingWrite:
    scored = index % 2 == 0
    payload = encode(
        Trajectory(np.ones(2, np.int32), np.zeros(2, np.float32), np.ones(2, np.uint8), VersionRuns(((2, serving),)))
    )
    meta = trajectory_pb2.MemberMeta(
        member=index,
        outcome=trajectory_pb2.OUTCOME_SCORED if scored else trajectory_pb2.OUTCOME_ERROR,
        reward=float(grant.task.row) if scored else 0.0,
        reason="" if scored else "broken",
        finish_reason=trajectory_pb2.FINISH_REASON_STOP,
        prompt_tokens=1,
        response_tokens=2,
        oldest=serving.to_proto(),
        newest=serving.to_proto(),
        unscored_ids=() if scored else (4, 5) if grant.task.row else (5,),
    )
    head = buffer_pb2.MemberWrite(group_id=grant.group_id, lease_id=grant.lease_id, attempt=grant.attempt, meta=meta)
    return PendingWrite(head, payload if scored else b"")


@asynccontextmanager
async def mesh(folder: Path) -> AsyncIterator[Mesh]:
    config = load_config(
        {
            "model": {"path": "m"},
            "data": {"train": "t"},
            "run": {"dir": str(folder)},
            "rollout": {"n": 2},
            "buffer": {"reconnect_grace_s": 0.2},
        }
    )
    service = BufferFront(config, host="127.0.0.1", port=0)
    await service.start()
    channel = open_channel(service.address, config.security)
    agent = MembershipAgent(
        channel, membership_pb2.ROLE_GENERATOR, member_id="g", address="", host_id="h", timeout_s=5, retry_s=5
    )
    try:
        await agent.start()
        client = BufferClient(channel, timeout_s=5, retry_s=5)
        await client.resume("train", "learner-1", 0)
        yield Mesh(client, agent, service.address)
    finally:
        await agent.leave()
        await channel.close()
        await service.stop()


def tasks(count: int) -> list[trajectory_pb2.PromptTask]:
    return [
        trajectory_pb2.PromptTask(
            row=row,
            prompt_ids=np.ones(1, "<i4").tobytes(),
            data_source="even" if row % 2 == 0 else "odd",
            n=2,
            sampling=trajectory_pb2.SamplingParams(max_tokens=2),
        )
        for row in range(count)
    ]
