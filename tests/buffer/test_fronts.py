"""Several fronts on one Redis, and fronts that are replaced under their clients."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import grpc
import pytest

from rollmesh.buffer.client.client import BufferClient
from rollmesh.buffer.policy.rules import rules_of
from rollmesh.buffer.server import admit_session as admission
from rollmesh.buffer.server import background_tasks, sample_session
from rollmesh.buffer.server.process import BufferFront, without_secrets
from rollmesh.buffer.store.keys import Keys
from rollmesh.mesh.access.roles import Identity, Role
from rollmesh.mesh.config import load_config
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.membership import MembershipAgent
from rollmesh.mesh.rpc.failover_channel import FailoverChannel, open_mesh
from rollmesh.mesh.tables import TABLES
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb
from rollmesh.protos import membership_pb2, membership_pb2_grpc
from tests.buffer.mesh_fixture import TIMEOUT_S, Mesh, make_config, make_write
from tests.buffer.packed import set_rule
from tests.buffer.redis_cluster import single_and_cluster
from tests.buffer.test_flow import balanced
from tests.certificates import Authority
from tests.secrets_here import write_secret

V0 = PolicyVersion(1, 0)


@single_and_cluster
async def test_two_fronts_serve_one_run(mesh: Mesh) -> None:
    config = make_config(mesh.folder, mesh.redis_url)
    left, right = await mesh.front(config), await mesh.front(config)
    learner, generator = await mesh.learner(left), await mesh.generator(right)
    admission, writer, sampler = generator.admission(), generator.writer(), learner.sampler()
    admission.update(4, V0)
    sampler.request(2, 0)
    await learner.seed(1, 4)  # the other front hears of it
    await generator.finish(writer, await generator.grants(admission, 2), V0)
    groups = await learner.collect(sampler, 2)
    assert (await learner.train(groups, 0)).claimed
    members = (await learner.membership.List(membership_pb2.ListRequest(), timeout=180)).members
    fronts = {m.address for m in members if m.role == membership_pb2.ROLE_BUFFER}
    assert fronts == {left.address, right.address}
    assert {m.role for m in members if m.address not in fronts} == {
        membership_pb2.ROLE_LEARNER,
        membership_pb2.ROLE_GENERATOR,
    }
    await balanced(learner)


async def test_clients_carry_on_when_their_front_is_replaced(mesh: Mesh) -> None:
    config = make_config(mesh.folder, mesh.redis_url)
    front = await mesh.front(config)
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 4)
    admission, writer, sampler = generator.admission(), generator.writer(), learner.sampler()
    admission.update(2, V0)
    grants = await generator.grants(admission, 2)
    await writer.write([make_write(grants[0], 0, [V0])])
    sampler.request(2, 0)
    port = int(front.address.rpartition(":")[2])
    await mesh.stop_front(front)
    fresh = await mesh.front(config, port=port)
    results = await writer.write([make_write(g, m, [V0]) for g in grants for m in range(2)])
    assert [r.status for r in results] == [pb.WRITE_STATUS_DUPLICATE] + 3 * [pb.WRITE_STATUS_STORED]
    groups = await learner.collect(sampler, 2)
    assert (await learner.train(groups, 0)).claimed
    assert fresh.address == front.address
    counts = await balanced(learner)
    assert (counts.consumed, counts.duplicate_writes) == (2, 1)


async def test_a_writer_that_had_nothing_to_write_for_long_outlives_its_front(mesh: Mesh) -> None:
    """As the one of a table that is seldom used: the silence before the front went is no one's fault."""
    config = make_config(mesh.folder, mesh.redis_url)
    front = await mesh.front(config)
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 2)
    admission = generator.admission()
    admission.update(1, V0)
    (grant,) = await generator.grants(admission, 1)
    client = BufferClient(generator.channel, timeout_s=5.0, retry_s=TIMEOUT_S)
    writer = client.writer("train", generator.agent.member_id, lambda: generator.agent.generation)
    generator.streams.append(writer)
    await writer.write([make_write(grant, 0, [V0])])
    writer._retries._clock = lambda: time.monotonic() + 1.2 * TIMEOUT_S
    port = int(front.address.rpartition(":")[2])
    await mesh.stop_front(front)
    # Until the channel knows: then the writer's stream has broken as well.
    with pytest.raises(grpc.aio.AioRpcError):
        await generator.membership.List(membership_pb2.ListRequest(), timeout=180)
    await mesh.front(config, port=port)
    async with asyncio.timeout(TIMEOUT_S):
        while generator.channel.get_state(try_to_connect=True) is not grpc.ChannelConnectivity.READY:
            await asyncio.sleep(0.05)
    (result,) = await writer.write([make_write(grant, 1, [V0])])
    assert result.status == pb.WRITE_STATUS_STORED


async def test_the_run_configuration_reaches_whoever_joins(mesh: Mesh) -> None:
    config = make_config(mesh.folder, mesh.redis_url)
    generator = await mesh.generator(await mesh.front(config))
    assert type(config).model_validate_json(generator.agent.config_json) == without_secrets(config)
    assert generator.agent.run_name == config.run.name


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis://user@host:1/2", "redis://host:1/2"),
        ("rediss-cluster://user@a:1,b:2,[::1]:3?ssl_ca_certs=/x@y", "rediss-cluster://a:1,b:2,[::1]:3?ssl_ca_certs=/x@y"),
        ("unix://user@/run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
        ("redis://host:1/2", "redis://host:1/2"),
    ],
)  # fmt: skip
def test_the_login_of_redis_stays_here(tmp_path: Path, url: str, told: str) -> None:
    config = without_secrets(make_config(tmp_path, url))
    assert config.buffer.redis == told
    assert type(config).model_validate_json(config.model_dump_json()) == config


async def test_a_finished_run_is_announced(mesh: Mesh) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.agent.leave(run_finished=True)
    await generator.agent.heartbeat()
    assert generator.agent.run_finished.is_set()
    assert generator.agent.learner is None


async def test_a_write_at_one_front_wakes_the_sampler_at_another(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sample_session, admission, background_tasks):
        monkeypatch.setattr(module, "_RECHECK_S", 1000.0)
    config = make_config(mesh.folder, mesh.redis_url)
    left, right = await mesh.front(config), await mesh.front(config)
    learner, generator = await mesh.learner(left), await mesh.generator(right)
    granted, writer, sampler = generator.admission(), generator.writer(), learner.sampler()
    granted.update(2, V0)
    sampler.request(2, 0)
    await learner.seed(1, 2)
    await generator.finish(writer, await generator.grants(granted, 2), V0)
    assert len(await learner.collect(sampler, 2)) == 2


async def test_hints_are_given_where_another_front_may_wait(mesh: Mesh) -> None:
    config = make_config(mesh.folder, mesh.redis_url)
    left = await mesh.front(config)
    learner = await mesh.learner(left)
    wake, redis = Keys(left.run_name).wake, left.access.client
    async with left.access.subscribed(wake) as subscription, asyncio.timeout(TIMEOUT_S):
        hints = (message["data"] async for message in subscription.listen())

        async def heard(ordinal: int) -> bool:
            await learner.seed(ordinal, ordinal)
            await redis.publish(wake, "end")
            return (await anext(hints)) != b"end"

        assert not await heard(1), "no other generator is there to be told of the task"
        right = await mesh.front(config)
        assert await heard(2)
        await mesh.stop_front(right)
        await redis.publish(wake, "gone")
        while await anext(hints) != b"gone":
            pass
        assert not await heard(3)


async def test_a_front_with_other_rules_is_refused_while_one_is_alive(mesh: Mesh) -> None:
    config = make_config(mesh.folder, mesh.redis_url)
    other = load_config({**config.model_dump(), "buffer": {**config.buffer.model_dump(), "max_staleness": 7}})
    front = await mesh.front(config)
    with pytest.raises(ConfigError, match=r"train: max_staleness is 1 there, 7 here.*stop them all first"):
        await mesh.front(other)
    learner = await mesh.learner(front)
    assert (await learner.client.describe("train")).max_staleness == 1
    await mesh.stop_front(front)
    await learner.kill()
    learner = await mesh.learner(await mesh.front(other), takeover=True)
    assert (await learner.client.describe("train")).max_staleness == 7


async def test_members_are_told_one_configuration_by_all_fronts(mesh: Mesh) -> None:
    config = make_config(mesh.folder, mesh.redis_url)
    hotter = load_config({**config.model_dump(), "rollout": {**config.rollout.model_dump(), "temperature": 0.5}})
    left, right = await mesh.front(config), await mesh.front(hotter)
    told = {(await mesh.generator(front)).agent.config_json for front in (left, right)}
    assert len(told) == 1


async def test_a_front_that_the_run_forgot_enters_again_or_ends(mesh: Mesh) -> None:
    config = make_config(mesh.folder, mesh.redis_url, buffer={"lease_s": 1.0})
    front = await mesh.front(config)
    keys = Keys(config.run.name)
    member = await front.access.client.srandmember(f"{keys.run}:fronts")
    await front.access.client.hdel(f"{keys.run}:generations", member)
    async with asyncio.timeout(TIMEOUT_S):
        while not await front.access.client.hexists(f"{keys.run}:generations", member):
            await asyncio.sleep(0.05)
    # Another has begun under other rules while this one was away.
    await front.access.client.sadd(f"{keys.run}:fronts", "another")
    await front.access.client.zadd(f"{keys.run}:heartbeats", {"another": 1 << 50})
    await set_rule(front, "train", "max_staleness", 3)
    await front.access.client.hdel(f"{keys.run}:generations", member)
    async with asyncio.timeout(TIMEOUT_S):
        assert isinstance(await front.failed(), ConfigError)


async def test_fronts_that_start_at_the_same_moment_all_serve(mesh: Mesh) -> None:
    for _ in range(3):
        config = make_config(mesh.folder, mesh.redis_url)
        fronts = await asyncio.gather(*(mesh.front(config) for _ in range(4)))
        learner = await mesh.learner(fronts[0])
        members = (await learner.membership.List(membership_pb2.ListRequest(), timeout=180)).members
        serving = {member.address for member in members if member.role == membership_pb2.ROLE_BUFFER}
        assert serving == {front.address for front in fronts}


async def test_fronts_that_find_redis_empty_all_enter_again(mesh: Mesh) -> None:
    config = make_config(mesh.folder, mesh.redis_url, buffer={"lease_s": 1.0})
    fronts = await asyncio.gather(*(mesh.front(config) for _ in range(4)))
    keys = Keys(config.run.name)
    listed = {front._front_id.encode() for front in fronts}
    redis = fronts[0].access.client
    await redis.delete(*await redis.keys(f"{keys.run}*"))
    async with asyncio.timeout(TIMEOUT_S):
        while not await redis.smembers(f"{keys.run}:fronts") == set(await redis.hkeys(keys.members)) == listed:
            await asyncio.sleep(0.05)
    for front in fronts:
        await mesh.stop_front(front)


async def test_a_front_taken_for_dead_that_lives_is_hinted_to_again(mesh: Mesh) -> None:
    config = make_config(mesh.folder, mesh.redis_url, buffer={"lease_s": 1.0})
    front = await mesh.front(config)
    fronts = f"{Keys(config.run.name).run}:fronts"
    alive = await front.access.client.smembers(fronts)
    rules = json.dumps({table: rules_of(config, table).to_fields() for table in TABLES})
    answer = await front.access.run_script("bootstrap", "", "who has just started Redis", 1000, 1, "its own", rules, "")
    assert answer == [b"ok", b"its own"]
    async with asyncio.timeout(TIMEOUT_S):
        while not alive <= await front.access.client.smembers(fronts):
            await asyncio.sleep(0.05)


async def test_fronts_protected_by_tls_and_token_are_checked_by_their_own_names(mesh: Mesh, tmp_path: Path) -> None:
    security = protection(tmp_path, "127.0.0.1", "127.0.0.2")
    left = await mesh.front(make_config(mesh.folder, mesh.redis_url, run={"name": "tls"}, security=security))
    right = BufferFront(
        make_config(mesh.folder, mesh.redis_url, run={"name": "tls"}, security=security), host="127.0.0.2", port=0
    )
    await right.start()
    section = load_config({"model": {"path": "-"}, "data": {"train": "-"}, "security": security}).security
    async with open_mesh(f"{left.address},{right.address}", section) as channel:
        await asyncio.wait_for(_all_ready(channel), TIMEOUT_S)
        stub = membership_pb2_grpc.MembershipStub(channel)
        for _ in range(4):
            assert len((await stub.List(membership_pb2.ListRequest(), timeout=180)).members) == 2
    identity = Identity(Role.GENERATOR, "generator-g")
    async with open_mesh(f"{left.address},{right.address}", section, identity) as channel:
        agent = MembershipAgent(
            channel,
            membership_pb2.ROLE_GENERATOR,
            member_id=identity.member_id,
            address="127.0.0.1:1",
            host_id="test",
        )
        await agent.start()
        for _ in range(4):
            await agent.heartbeat()
        assert agent.run_name == "tls"
        assert set(channel.addresses) == {left.address, right.address}
        await agent.leave()
    stranger = load_config(
        {"model": {"path": "-"}, "data": {"train": "-"}, "security": {**security, "token_file": None}}
    )
    async with open_mesh(left.address, stranger.security) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await membership_pb2_grpc.MembershipStub(channel).List(membership_pb2.ListRequest(), timeout=180)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await right.stop()


async def _all_ready(channel: FailoverChannel) -> None:
    """Waits until every front of a channel is connected."""
    for front in channel._fronts.values():
        while (state := front.channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
            await front.channel.wait_for_state_change(state)


def protection(folder: Path, *hosts: str) -> dict[str, str]:
    """The security section of services with one certificate, made here, for some addresses."""
    authority = Authority(folder)
    cert, key = authority.certify("fronts", *hosts)
    token = write_secret(folder / "token")
    return {"tls_key": str(key), "tls_cert": str(cert), "tls_ca": str(authority.pem), "token_file": str(token)}
