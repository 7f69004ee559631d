"""A run with many members: none waits for another, and members that say nothing new cost nothing."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from rollmesh.buffer.policy.turns import GeneratorTurns
from rollmesh.buffer.server.servicer import BufferServicer
from rollmesh.buffer.store import member_registry
from rollmesh.buffer.store.keys import Keys
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.rpc.connection_options import keepalive_of
from rollmesh.mesh.rpc.failover_channel import open_mesh
from rollmesh.protos import buffer_pb2, membership_pb2
from tests.buffer.mesh_fixture import Mesh, make_config

_MANY = 40


async def _joined(mesh: Mesh) -> Any:
    """The store of a front, with many generators among the members."""
    front = await mesh.front()
    assert front.metrics is not None
    store = front.metrics.front.store
    for number in range(_MANY):
        member = membership_pb2.Member(member_id=f"many-{number}", role=membership_pb2.ROLE_GENERATOR)
        assert await store.members.join(member, call=1)
    return store


async def test_members_ask_for_signs_of_life_as_rarely_as_fronts_do(mesh: Mesh) -> None:
    front = await mesh.front(make_config(mesh.folder, mesh.redis_url, buffer={"lease_s": 60.0}))
    channel = open_mesh(front.address, SecuritySection())
    agent = MembershipAgent(channel, membership_pb2.ROLE_GENERATOR, member_id="member", address="a:1", host_id="host")
    await agent.start()
    try:
        assert channel.keepalive_s == keepalive_of(60.0) == 20.0
    finally:
        await agent.leave()
        await channel.close()


async def test_one_sweep_ends_the_leases_of_all_whose_term_is_over(mesh: Mesh) -> None:
    store = await _joined(mesh)
    keys = Keys(store.keys.run_name)
    # Members that were lost together are forgotten together: portions follow one another at once.
    await store.redis.batch([("ZADD", keys.heartbeats, 1, f"many-{number}") for number in range(_MANY)])
    await store.expire("train", 1000)
    members, _ = await store.members.read_all()
    assert not [member for member in members if member.member_id.startswith("many")]
    assert await store.redis.batch([("SMEMBERS", keys.role(membership_pb2.ROLE_GENERATOR))]) == [[]]


async def test_a_list_of_one_role_reads_no_member_of_another(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each generator asks for the reward services every few seconds: all of them together must not cost n * n."""
    store = await _joined(mesh)
    found: list[Any] = []
    batch = store.redis.batch

    async def watched(commands: Any) -> Any:
        found.extend(commands)
        return await batch(commands)

    monkeypatch.setattr(store.redis, "batch", watched)
    assert await store.members.read_role(membership_pb2.ROLE_REWARD) == ([], False)
    reward = membership_pb2.Member(member_id="reward-1", role=membership_pb2.ROLE_REWARD, address="a:1")
    generation = (await store.members.join(reward)).generation
    request = membership_pb2.HeartbeatRequest(member_id="reward-1", generation=generation, waiting_reason="busy")
    await store.members.heartbeat(request, 1000)
    [member], _ = await store.members.read_role(membership_pb2.ROLE_REWARD)
    assert (member.member_id, member.address, member.waiting_reason) == ("reward-1", "a:1", "busy")
    assert member.heartbeat_age_ms < 60_000
    names = {argument for command in found for argument in command if "many" in str(argument)}
    assert not names
    assert not [command for command in found if command[0] == "HGETALL"]
    await store.members.leave("reward-1", generation)
    assert await store.members.read_role(membership_pb2.ROLE_REWARD) == ([], False)


async def test_members_are_parsed_again_where_they_say_something_new(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await _joined(mesh)
    first, _ = await store.members.read_all()
    parsed: list[bytes] = []
    parse = member_registry._member_with_status

    def counted(description: bytes, status: bytes | None) -> membership_pb2.Member:
        parsed.append(description)
        return parse(description, status)

    monkeypatch.setattr(member_registry, "_member_with_status", counted)
    again, _ = await store.members.read_all()
    assert [member.member_id for member in again] == [member.member_id for member in first]
    # The front itself sends heartbeats meanwhile.
    assert len(parsed) <= 1
    request = membership_pb2.HeartbeatRequest(member_id="many-3", waiting_reason="new")
    await store.redis.batch([("HSET", f"{store.keys.run}:status", "many-3", request.SerializeToString())])
    news, _ = await store.members.read_all()
    assert [member.waiting_reason for member in news if member.member_id == "many-3"] == ["new"]
    assert len(parsed) <= 3


async def test_writes_of_many_generators_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few at once, and fewer during the learner's calls, which do not wait for those of all generators."""
    front: Any = SimpleNamespace(turns=GeneratorTurns(at_once=4, with_learner=2))
    handlers = BufferServicer(front)
    at_work, most = 0, 0

    async def store(_self: BufferServicer, parts: Any) -> Any:
        nonlocal at_work, most
        at_work += 1
        most = max(most, at_work)
        await asyncio.sleep(0)
        at_work -= 1
        return parts

    async def commit(*_: object) -> int:
        await asyncio.gather(*map(handlers._write, messages))
        return 0

    monkeypatch.setattr(BufferServicer, "_store_members", store)
    front.store, front.checked_table = SimpleNamespace(commit=commit), str
    messages: list[Any] = list(range(1000))
    assert await asyncio.gather(*map(handlers._write, messages)) == messages
    assert most == 4
    most = 0
    await handlers.Commit(buffer_pb2.CommitRequest(), None)
    assert most == 2
