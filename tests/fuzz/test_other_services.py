"""RPCs of generator, learner, weights and rewards under messages that no service would send, while a run trains."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.mesh.runtime.async_bridge import AsyncBridge
from rollmesh.protos import (
    generator_pb2,
    learner_pb2,
    learner_pb2_grpc,
    membership_pb2,
    membership_pb2_grpc,
    reward_pb2,
    reward_pb2_grpc,
    weights_pb2,
)
from rollmesh.reward_service.scoring.engine import ScoringEngine
from rollmesh.reward_service.server.server import RewardServer
from tests.fuzz.calls import TYPED, call, methods_of
from tests.fuzz.messages import damaged, messages
from tests.fuzz.test_rpcs import FEW
from tests.learner.live.test_runs import assert_nothing_twice, ledger, wait_for_line
from tests.learner.live.tiny import make_config, meanwhile, open_mesh, run_learner
from tests.nodes import reward

_LIFE_S = 240.0
KNOWN = {
    "run": ["tiny"], "incarnation": [1], "version": [0, 1, 2], "bucket": [0], "index": [0], "offset": [0, 1],
    "member_id": ["generator"], "item_id": ["a", "b"], "response": ["42"], "ground_truth_json": ["42", "{"],
    "extra_info_json": ["{}", "["], "data_source": ["arithmetic", "gsm8k"], "path": ["config.json"],
    "prompt_ids": [b"\1\0\0\0"], "max_tokens": [2], "n": [1],
}  # fmt: skip
# They end what the test needs; a last call shows that they work.
ENDING = frozenset({"Stop", "Drain"})


def storm(bridge: AsyncBridge, address: str, methods: list[MethodDescriptor]) -> None:
    """Sends random messages and damaged bytes to each method."""

    async def open_channel() -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address)

    channel = bridge.call(open_channel(), _LIFE_S)

    for method in methods:
        _storm_one(bridge, channel, method)
    bridge.call(channel.close(), _LIFE_S)


def _storm_one(bridge: AsyncBridge, channel: grpc.aio.Channel, method: MethodDescriptor) -> None:
    @FEW
    @given(
        sent=st.lists(messages(method.input_type, lambda name: KNOWN.get(name, ())), min_size=1, max_size=2),
        data=st.data(),
    )
    def one(sent: list[Message], data: st.DataObject) -> None:
        requests = [message.SerializeToString() for message in sent]
        if data.draw(st.booleans()):
            requests = [data.draw(damaged(requests[0]))]
        answer = bridge.call(call(channel, method, requests), _LIFE_S)
        assert answer.code in TYPED, f"{method.full_name}: {answer.code} {answer.details}"

    one()


def test_a_run_trains_through_a_storm(tmp_path: Path) -> None:
    # No faster than it is stormed: steps would be most of the test.
    slowly = [f"{reward.__file__}:{reward.compute_score.__name__}"]
    config = make_config(tmp_path, {"learner.steps": 100_000, "data.eval": None, "reward.functions": slowly})
    bridge = AsyncBridge("storm")
    ready_file = tmp_path / "learner.ready"
    with open_mesh(config) as mesh:

        def storms() -> None:
            wait_for_line(config.run.folder / "metrics.jsonl", lambda line: line["step"] == 2)
            address = json.loads(ready_file.read_text())["address"]
            generator = bridge.call(_generator_address(mesh.address), _LIFE_S)
            try:
                for target, module, service in (
                    (address, learner_pb2, "LearnerControl"),
                    (address, weights_pb2, "Weights"),
                    (generator, generator_pb2, "GeneratorControl"),
                ):
                    methods = methods_of(module.DESCRIPTOR.services_by_name[service])
                    storm(bridge, target, [method for method in methods if method.name not in ENDING])
            finally:
                bridge.call(_stop(address), _LIFE_S)

        with meanwhile(storms):
            assert run_learner(config, mesh.address, ready_file=ready_file) == 0
        assert ledger(mesh.address).recounted.trained > 0
    bridge.close()
    assert_nothing_twice(config)


def test_rewards_are_scored_after_a_storm() -> None:
    bridge = AsyncBridge("storm")

    async def start() -> tuple[RewardServer, str]:
        server = RewardServer(ScoringEngine(("auto",)), timeout_s=5.0)
        return server, f"127.0.0.1:{await server.start()}"

    server, address = bridge.call(start(), _LIFE_S)
    storm(bridge, address, methods_of(reward_pb2.DESCRIPTOR.services_by_name["Reward"]))
    bridge.call(_scores(address), _LIFE_S)
    bridge.call(server.stop(), _LIFE_S)
    bridge.close()


async def _generator_address(mesh: str) -> str:
    """Waits until the generator has joined."""
    async with grpc.aio.insecure_channel(mesh) as channel, asyncio.timeout(_LIFE_S):
        stub = membership_pb2_grpc.MembershipStub(channel)  # type: ignore[no-untyped-call]
        while True:
            members = (await stub.List(membership_pb2.ListRequest(role=membership_pb2.ROLE_GENERATOR))).members
            if members and members[0].address:
                return str(members[0].address)
            await asyncio.sleep(0.02)  # another process joins: there is nothing to wait on


async def _stop(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = learner_pb2_grpc.LearnerControlStub(channel)  # type: ignore[no-untyped-call]
        await stub.Stop(learner_pb2.StopRequest(), timeout=_LIFE_S)


async def _scores(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = reward_pb2_grpc.RewardStub(channel)  # type: ignore[no-untyped-call]
        item = reward_pb2.ScoreItem(
            item_id="a", data_source="arithmetic", prompt="40+2=", response="42", ground_truth_json='"42"'
        )
        response = await stub.Score(reward_pb2.ScoreRequest(items=[item]), timeout=_LIFE_S)
        assert response.results[0].scored.total == 1.0
