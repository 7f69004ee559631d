"""A learner that trains nothing: publishes real weights, seeds prompts, takes what is stored, decodes and claims it."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import uvloop
from safetensors.torch import load_file

from benchmarks.engines.plan import Arrival, Plan
from benchmarks.engines.worker_process import requests
from rollmesh.buffer.client.client import BufferClient, SampleStream
from rollmesh.learner.weights import WeightPublisher, WeightsService, read_model_bundle
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.rpc.channel import open_channel
from rollmesh.mesh.rpc.server import bind, new_server
from rollmesh.mesh.runtime.hosts import host_id
from rollmesh.mesh.runtime.memory_tuning import freeze_heap, keep_freed_memory
from rollmesh.mesh.trajectory.payload_codec import decode
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2, membership_pb2, trajectory_pb2, weights_pb2_grpc

RUN = "benchmark"
BATCH_GROUPS = 8
_TABLE = "train"
_SECURITY = SecuritySection()
_ARRIVAL_S = 300.0
# Batches that are asked for ahead.
_AHEAD = 3


def learner(pipe: Connection, plan: Plan, address: str) -> None:
    """Answers passes, each with what was stored and when it had come."""
    keep_freed_memory()  # as learners do
    uvloop.run(_learner(pipe, plan, address))


async def _learner(pipe: Connection, plan: Plan, address: str) -> None:
    publisher = WeightPublisher(RUN, read_model_bundle(plan.model))
    server = new_server(_SECURITY)
    weights_pb2_grpc.add_WeightsServicer_to_server(WeightsService(publisher), server)
    port = bind(server, "127.0.0.1", 0, _SECURITY)
    await server.start()
    channel = open_channel(address, _SECURITY)
    client = BufferClient(channel, timeout_s=10.0, retry_s=30.0)
    agent = MembershipAgent(
        channel,
        membership_pb2.ROLE_LEARNER,
        member_id="stand-in",
        address=f"127.0.0.1:{port}",
        host_id=host_id(),
    )
    await agent.start()
    try:
        incarnation = (await client.resume(_TABLE, agent.member_id, 0)).incarnation
        agent.set_status(incarnation=incarnation)
        await agent.heartbeat()
        publisher.publish(PolicyVersion(incarnation, 0), load_file(plan.model / "model.safetensors").items(), "float32")
        await client.set_policy_version(incarnation, 0)
        freeze_heap()
        pipe.send("ready")
        taking = _Taking(client, incarnation)
        loop = asyncio.get_running_loop()
        questions = iter(requests(pipe))
        while (groups := await loop.run_in_executor(None, next, questions, None)) is not None:
            pipe.send(await taking.one_pass(replace(plan, groups=groups)))
        await taking.close()
    finally:
        await agent.stop()
        await server.stop(0)
        publisher.close()


class _Taking:
    """Seeds and takes, pass after pass."""

    def __init__(self, client: BufferClient, incarnation: int) -> None:
        self._client = client
        self._incarnation = incarnation
        self._stream: SampleStream = client.sample(_TABLE, incarnation)
        self._seeded = 0
        self._version = 0
        for version in range(_AHEAD):
            self._stream.request(BATCH_GROUPS, version)

    async def one_pass(self, plan: Plan) -> list[Arrival]:
        """All groups of the plan, once.

        Raises:
            TimeoutError: nothing came for long.
            ValueError: a response that is not what was asked for.
        """
        tasks = [task_of(plan, index, ordinal=self._seeded + index + 1) for index in range(plan.groups)]
        await self._client.seed(_TABLE, self._incarnation, tasks)
        self._seeded += plan.groups
        arrivals: list[Arrival] = []
        batch: list[buffer_pb2.LeaseRef] = []
        came = 0
        while came < plan.groups:
            response = await self._stream.next(_ARRIVAL_S)
            if response is None:
                raise TimeoutError(f"no group for {_ARRIVAL_S:.0f} s: {self._stream.waiting_reason}")
            now, responses, tokens = time.perf_counter(), 0, 0
            for group in response.groups:
                stored = [len(decode(payload).response_ids) for payload in group.payloads]
                if len(stored) != plan.n or any(meta.reason for meta in group.leased.members):
                    raise ValueError(f"group {group.leased.group_id} has {stored}: {group.leased.members}")
                responses += len(stored)
                tokens += sum(stored)
                batch.append(buffer_pb2.LeaseRef(group_id=group.leased.group_id, lease_id=group.leased.lease_id))
            came += len(response.groups)
            arrivals.append(Arrival(now, responses, tokens))
            while len(batch) >= BATCH_GROUPS:
                await self._claim(batch[:BATCH_GROUPS])
                del batch[:BATCH_GROUPS]
        return arrivals

    async def _claim(self, leases: list[buffer_pb2.LeaseRef]) -> None:
        answer = await self._client.claim(_TABLE, self._incarnation, self._version, leases)
        if not answer.claimed:
            raise ValueError(f"a batch was refused: {answer.refused}")
        self._version += 1
        self._stream.request(BATCH_GROUPS, self._version + _AHEAD - 1)

    async def close(self) -> None:
        """Ends the stream."""
        await self._stream.close()


def task_of(plan: Plan, index: int, ordinal: int) -> trajectory_pb2.PromptTask:
    """A group of a pass as a prompt task."""
    prompt, length = plan.group(index)
    return trajectory_pb2.PromptTask(
        task_id=f"task-{ordinal}",
        ordinal=ordinal,
        prompt_ids=np.array(prompt, "<i4").tobytes(),
        data_source="benchmark/letters",
        ground_truth_json=json.dumps("g"),
        n=plan.n,
        sampling=trajectory_pb2.SamplingParams(temperature=1.0, max_tokens=length),
    )
