"""Every RPC of the buffer under messages that are malformed, damaged, oversized, repeated and out of order.

Nothing may crash, hang, or be answered without a type. Afterwards the ledger balances, and a learner that takes over
trains as if nothing had been.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from rollmesh.buffer.redis_backend.embedded import EmbeddedRedis
from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2, membership_pb2
from tests.buffer.mesh_fixture import Mesh, make_task, make_write, nothing_within
from tests.fuzz.calls import TYPED, Answer, call
from tests.fuzz.messages import damaged, messages

METHODS = [
    *buffer_pb2.DESCRIPTOR.services_by_name["Buffer"].methods,
    *membership_pb2.DESCRIPTOR.services_by_name["Membership"].methods,
]
BY_NAME = {method.name: method for method in METHODS}
_LIFE_S = 240.0


class Target:
    """A front with groups in every state, and what a stranger could know of them."""

    def __init__(self, folder: Path) -> None:
        self.bridge = AsyncBridge("fuzz")
        self.redis = EmbeddedRedis(folder / "redis", durability="everysec")
        asyncio.run(self.redis.start())
        self.known: dict[str, list[Any]] = defaultdict(list)
        self.bridge.call(self._start(folder), _LIFE_S)

    async def _start(self, folder: Path) -> None:
        self.mesh = Mesh(self.redis.url, folder)
        self.front = await self.mesh.front(buffer={"max_staleness": 3}, network={"max_message_mb": 1})
        self.channel = grpc.aio.insecure_channel(self.front.address)
        await self.people()

    async def people(self) -> None:
        """A learner and a generator come (again), and leave groups in every state."""
        learner = await self.mesh.learner(self.front, takeover=True, force=True)
        generator = await self.mesh.generator(self.front)
        first = learner.resumed.seeded + 1
        version = PolicyVersion(learner.incarnation, 0)
        tasks = [make_task(first + i) for i in range(6)]
        await learner.client.seed("train", learner.incarnation, tasks, withdraw_pending=True)
        admission, writer = generator.admission(), generator.writer()
        admission.update(5, version)
        grants = await generator.grants(admission, 5)
        await generator.finish(writer, grants[:4], version)
        sampler = learner.sampler()
        groups = await learner.batch(sampler, 2, 0)
        assert (await learner.train(groups, 0)).claimed
        leased = await learner.batch(sampler, 1, 1)
        write = make_write(grants[4], 0, [version] * 3)
        self.learner, self.generator = learner, generator
        self.known.update(
            {
                "table": ["train", "eval"],
                "group_id": [*(g.group_id for g in (*grants, *leased)), f"{grants[0].group_id}:0"],
                "group_ids": [g.group_id for g in grants],
                "lease_id": [g.lease_id for g in (*grants, *leased)],
                "member_id": [generator.agent.member_id, learner.agent.member_id, "learner"],
                "generation": [generator.agent.generation, learner.agent.generation],
                "incarnation": [learner.incarnation, learner.incarnation, learner.incarnation - 1],
                "attempt": [1, 2],
                "member": [0, 1, 2],
                "n": [1, 2],
                "ordinal": [first, first + 10],
                "protocol": [1],
                "credits": [1, 3],
                "version": [0, 1, 2],
                "for_version": [1, 2],
                "train_version": [1, 2],
                "resume_version": [0, 1, 2],
                "prompt_ids": [make_task(1).prompt_ids],
                "payloads": [write.payload, write.payload * 2],
                "payload_bytes": [len(write.payload), len(write.payload) - 1],
                "data": [write.payload],
                "response_tokens": [3],
                "prompt_tokens": [4],
                "outcome": [1],
                "role": [1, 2, 3],
            }
        )

    def pool(self, field: str) -> Sequence[Any]:
        return self.known[field]

    def send(self, name: str, requests: Sequence[bytes], patience_s: float = 0.05) -> Answer:
        return self.bridge.call(call(self.channel, BY_NAME[name], requests, patience_s), _LIFE_S)

    async def balances(self) -> None:
        for table in ("train", "eval"):
            ledger = await self.learner.client.ledger(table, 10)
            assert list(ledger.discrepancies) == []
        assert await nothing_within(self.front.failed(), 0), "the front's upkeep has failed"

    async def works(self) -> None:
        """A learner that takes over is offered groups, trains and commits them, whatever other learners hold by now."""
        await self.learner.kill()
        await self.generator.kill()
        learner = self.learner = await self.mesh.learner(self.front, takeover=True, force=True)
        generator = await self.mesh.generator(self.front)
        first = learner.resumed.seeded + 1
        await learner.client.seed("train", learner.incarnation, [make_task(first + i) for i in range(4)])
        admission, writer = generator.admission(), generator.writer()
        version = PolicyVersion(learner.incarnation, 0)
        admission.update(4, version)

        async def work() -> None:
            async for grant in admission:
                await generator.finish(writer, [grant], version)

        working = asyncio.create_task(work())
        try:
            groups = await learner.batch(learner.sampler(), 2, 0)
            assert (await learner.train(groups, 0)).claimed
        except TimeoutError:
            state = await learner.client.describe("train")
            raise AssertionError(f"no batch; the generator waits: {admission.waiting_reason}\n{state}") from None
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        await self.balances()
        assert (await learner.client.commit("train", learner.incarnation, 1)).trained >= 2

    def close(self) -> None:
        async def end() -> None:
            await self.channel.close()
            await self.mesh.close()

        self.bridge.call(end(), _LIFE_S)
        self.bridge.close()
        asyncio.run(self.redis.stop())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    found = Target(tmp_path_factory.mktemp("fuzz"))
    yield found
    found.close()


def check(name: str, answer: Answer) -> None:
    assert answer.code in TYPED, f"{name}: {answer.code} {answer.details}"


# More in the second tier, and for a longer storm by hand.
FEW = settings(
    max_examples=int(os.environ.get("ROLLMESH_FUZZ_EXAMPLES", settings().max_examples // 4)),
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_any_message_gets_a_typed_answer(target: Target, name: str) -> None:
    method = BY_NAME[name]

    @FEW
    @given(
        sent=st.lists(messages(method.input_type, target.pool), min_size=1, max_size=4),
        twice=st.booleans(),
        backwards=st.booleans(),
    )
    def storm(sent: list[Message], twice: bool, backwards: bool) -> None:
        requests = [message.SerializeToString() for message in sent]
        requests = requests * 2 if twice else requests
        requests = requests[::-1] if backwards else requests
        check(name, target.send(name, requests))

    storm()
    target.bridge.call(target.balances(), _LIFE_S)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_damaged_bytes_get_an_answer(target: Target, name: str) -> None:
    method = BY_NAME[name]

    @FEW
    @given(data=st.data())
    def storm(data: st.DataObject) -> None:
        whole = data.draw(messages(method.input_type, target.pool)).SerializeToString()
        requests = [data.draw(damaged(whole)) for _ in range(data.draw(st.integers(1, 3)))]
        check(name, target.send(name, requests))

    storm()
    target.bridge.call(target.balances(), _LIFE_S)


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_a_message_over_the_limit_is_refused_as_such(target: Target, name: str) -> None:
    answer = target.send(name, [bytes(2 << 20)], patience_s=_LIFE_S)
    assert answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED, answer
    target.bridge.call(target.balances(), _LIFE_S)


def test_afterwards_a_learner_trains_as_if_nothing_had_been(target: Target) -> None:
    target.bridge.call(target.works(), _LIFE_S)
