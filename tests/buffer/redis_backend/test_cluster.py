"""Redis Cluster, a real one: where keys lie, moved slots, nodes that die, and the order that payloads need."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import hiredis
import pytest

from rollmesh.buffer.redis_backend.access import RedisAccess
from rollmesh.buffer.redis_backend.cluster import SLOTS, ClusterConnection, slot_of
from rollmesh.buffer.store.keys import Keys
from rollmesh.mesh.config.redis_url import parse_redis_url
from rollmesh.mesh.errors import StoreError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.buffer.mesh_fixture import TIMEOUT_S, Mesh
from tests.buffer.redis_cluster import LocalCluster, Node
from tests.buffer.redis_proxy import Proxy
from tests.buffer.test_crashes import train_for
from tests.buffer.test_flow import balanced
from tests.buffer.test_redis_connection import documented

V0 = PolicyVersion(1, 0)
on_cluster = pytest.mark.parametrize("mesh", ["cluster"], indirect=True)


@pytest.fixture
async def cluster(redis_cluster: LocalCluster) -> AsyncIterator[LocalCluster]:
    yield redis_cluster
    await redis_cluster.disconnect()


@asynccontextmanager
async def opened(url: str, run_key: str, timeout_s: float = TIMEOUT_S) -> AsyncIterator[RedisAccess]:
    access = RedisAccess(url, run_key, timeout_s=timeout_s)
    try:
        yield access
    finally:
        await access.close()


@pytest.fixture
async def access(cluster: LocalCluster) -> AsyncIterator[RedisAccess]:
    """A run of its own; its verbs are loaded."""
    async with opened(cluster.url, Keys(uuid.uuid4().hex).run) as found:
        await found.load()
        yield found


def others(cluster: LocalCluster, node: Node) -> list[Node]:
    return [other for other in cluster.nodes if other is not node]


async def key_on(cluster: LocalCluster, node: Node, prefix: str = "k") -> str:
    """A fresh key in a slot of this node."""
    while True:
        key = f"{prefix}{uuid.uuid4().hex}"
        if await cluster.owner(key) is node:
            return key


async def test_slots_are_those_of_redis(cluster: LocalCluster) -> None:
    run = Keys("r")
    names = [
        "",
        "a",
        "{a}b",
        "x{a}{b}",
        "{}a",
        "{a",
        "a}",
        "{{a}}",
        "äöü",
        run.run,
        run.wake,
        run.payload("train", "g", 0, 1),
    ]
    found = [await cluster.nodes[0].call("CLUSTER", "KEYSLOT", name) for name in names]
    assert [slot_of(name) for name in names] == found
    assert slot_of(b"{a}b") == slot_of("a") < SLOTS


@on_cluster
async def test_metadata_shares_a_slot_and_payloads_lie_on_all_nodes(mesh: Mesh, cluster: LocalCluster) -> None:
    front, learner, generator, _, grants = await mesh.granted(4)
    writer = generator.writer()
    await generator.finish(writer, grants, V0)
    await learner.train(await learner.batch(learner.sampler(), 2, 0), 0)
    run, home = Keys(front.run_name).run, await cluster.owner(Keys(front.run_name).run)
    before = set(await home.client.keys(f"{run}*"))
    metadata = {key.decode() async for key in front.access.scan(f"{run}*")}
    after = set(await home.client.keys(f"{run}*"))
    assert len(metadata) > 8
    assert before & after <= metadata <= before | after, "a front writes its keys whenever it likes"
    assert {slot_of(key) for key in metadata} == {slot_of(run)}
    assert not any([await node.client.keys(f"{run}*") for node in cluster.nodes if node is not home])
    plain = {key async for key in front.access.scan(f"rollmesh:{front.run_name}:*", count=10)}
    assert len(plain) == 4 + 8, "prompts, and payloads of two members each"
    assert all([await node.client.keys(f"rollmesh:{front.run_name}:*") for node in cluster.nodes])
    await balanced(learner)


async def test_connections_to_nodes_that_hold_nothing_are_closed(cluster: LocalCluster) -> None:
    wire = ClusterConnection(parse_redis_url(cluster.url), "{r}", TIMEOUT_S)
    await wire.send([("SET", await key_on(cluster, node), "1", "EX", 60) for node in cluster.nodes])
    gone = ("127.0.0.1", cluster.nodes[0].port + 20_000)
    wire._connection(gone)
    async with asyncio.timeout(TIMEOUT_S):
        while gone in wire._connections:  # while it is still being asked for the map, it is left for the next one
            wire._stale = True
            await wire.send([("PING",)])
    assert set(wire._connections) == {("127.0.0.1", node.port) for node in cluster.nodes}
    wire.close()


async def test_commands_of_many_keys_are_split_and_put_together(cluster: LocalCluster, access: RedisAccess) -> None:
    keys = [await key_on(cluster, node) for node in cluster.nodes for _ in range(3)]
    await access.batch([("SET", key, f"value {i}") for i, key in enumerate(keys)])
    values = await access.mget([*reversed(keys), "missing"])
    assert values == [*(f"value {i}".encode() for i in reversed(range(9))), None]
    removed, clock, left = await access.batch([("UNLINK", *keys, "missing"), ("TIME",), ("GET", keys[0])])
    assert (removed, len(clock), left) == (9, 2, None)


async def test_what_comes_behind_is_sent_only_after_all_was_acknowledged(
    cluster: LocalCluster, access: RedisAccess
) -> None:
    home = await cluster.owner(access._run_key)
    good, refused = [await key_on(cluster, node) for node in others(cluster, home)]
    verb = ("join", "", "member", 1, "description", 0, 1)
    await access.batch([("HSET", refused, "a", "b")])
    with pytest.raises(StoreError, match="WRONGTYPE"):
        await access.run_after([("SET", good, "1"), ("INCR", refused)], *verb)
    assert not await home.client.exists(f"{access._run_key}:members"), "the verb was not run"
    await access.run_after([("SET", good, "1")], *verb)
    assert await home.client.hget(f"{access._run_key}:members", "member") == "description"


async def test_verbs_are_loaded_again_where_the_home_forgot_them(cluster: LocalCluster, access: RedisAccess) -> None:
    home = await cluster.owner(access._run_key)
    await home.call("SCRIPT", "FLUSH")
    assert (await access.run_script("read_table", "train"))[0] == b"ok"
    digest = access._scripts["read_table"].digest
    assert await home.call("SCRIPT", "EXISTS", digest) == [1]


async def test_a_payload_slot_moves_under_readers_and_writers(cluster: LocalCluster, access: RedisAccess) -> None:
    source, target, bystander = cluster.nodes
    tag = await key_on(cluster, source)
    old, new = f"{{{tag}}}old", f"{{{tag}}}new"
    await access.batch([("SET", old, "old")])
    await cluster.begin_move(tag, source, target)
    assert (await access.batch([("SET", new, "new"), ("GET", old), ("GET", new)]))[1:] == [b"old", b"new"]
    assert await source.client.exists(old), "what is there stays until it is moved"
    assert await cluster.move_keys(tag, source, target) >= 1, "what earlier tests have left in that slot moves as well"
    assert await access.mget([old, new]) == [b"old", b"new"]
    await cluster.end_move(tag, source, target)
    assert await access.mget([old, new, await key_on(cluster, bystander)]) == [b"old", b"new", None]
    assert await access.batch([("UNLINK", old, new)]) == [2]


@on_cluster
async def test_slots_that_move_in_the_middle_of_a_run_lose_nothing(mesh: Mesh, cluster: LocalCluster) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 100)
    run = asyncio.create_task(train_for(learner, generator, 0, 19))
    key = Keys(front.run_name).run
    source = await cluster.owner(key)
    target = others(cluster, source)[0]

    async def trained(versions: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            before = (await learner.client.describe("train")).next_train_version
            while not run.done() and (await learner.client.describe("train")).next_train_version < before + versions:
                await asyncio.sleep(0.02)

    await trained(3)
    payload = next(iter(await source.client.keys(f"rollmesh:{front.run_name}:*")))
    await cluster.begin_move(payload, source, target)
    await trained(2)
    await cluster.move_keys(payload, source, target)
    await cluster.end_move(payload, source, target)
    # The run's own slot: no verb may see half of it.
    await cluster.begin_move(key, source, target)
    with pytest.raises(StoreError, match="moving"):
        await front.access.run_script("read_table", "train")
    await source.call("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
    with pytest.raises(StoreError, match="moving"):
        await front.access.run_script("read_table", "train")
    assert await cluster.move_keys(key, source, target) > 5
    await cluster.end_move(key, source, target)
    claimed = await run
    assert len(claimed) == 40
    counts = await balanced(learner)
    assert (counts.consumed, counts.failed, counts.evicted_stale) == (40, 0, 0)


@on_cluster
async def test_nodes_killed_in_the_middle_of_a_run_come_back_with_all_of_it(mesh: Mesh, cluster: LocalCluster) -> None:
    front = await mesh.front()
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    for actor in (learner, generator):
        actor.client._retry_s = 30.0
    await learner.seed(1, 60)
    claimed = await train_for(learner, generator, 0, 4)
    home = await cluster.owner(Keys(front.run_name).run)
    other = others(cluster, home)[0]
    on_other = await key_on(cluster, other)
    other.kill()
    with pytest.raises(StoreError, match=r"unreachable|cluster is down"):
        await front.access.run_after([("SET", on_other, "1")], "join", "", "never", 1, "description", 0, 1)
    home.kill()
    with pytest.raises(StoreError, match=r"unreachable|cluster is down"):
        await front.access.run_script("read_table", "train")
    run = asyncio.create_task(train_for(learner, generator, 5, 9))
    for node in (home, other):
        node.start()
    await cluster.ready()
    async with asyncio.timeout(180):
        claimed |= await run
    assert len(claimed) == 20
    assert not await home.client.hexists(f"{Keys(front.run_name).run}:members", "never")
    counts = await balanced(learner)
    assert (counts.consumed, counts.failed, counts.evicted_stale) == (20, 0, 0)


async def test_one_living_node_of_those_named_is_enough(cluster: LocalCluster) -> None:
    async with opened(f"redis-cluster://127.0.0.1:1,127.0.0.1:{cluster.nodes[2].port}", "{run}") as access:
        assert len(await access._connection.primaries()) == 3
    async with opened("redis-cluster://127.0.0.1:1,127.0.0.1:2", "{run}") as access:
        with pytest.raises(StoreError, match=r"no node of redis-cluster://127\.0\.0\.1:1,127\.0\.0\.1:2 answers"):
            await access.load()


async def test_a_map_that_never_settles_is_an_error(cluster: LocalCluster) -> None:
    """Two nodes that send us to each other: the source waits for keys that the target does not import."""
    source, target, _ = cluster.nodes
    key = await key_on(cluster, source)
    await source.call("CLUSTER", "SETSLOT", slot_of(key), "MIGRATING", target.name)
    wire = ClusterConnection(parse_redis_url(cluster.url), "{run}", TIMEOUT_S)
    try:
        (reply,) = await wire.send([("GET", key)])
        assert isinstance(reply, hiredis.ReplyError)
        assert str(reply).startswith(("MOVED", "ASK"))
    finally:
        await source.call("CLUSTER", "SETSLOT", slot_of(key), "STABLE")
        wire.close()


async def test_a_node_that_sends_us_on_is_believed_more_than_an_old_map(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, _ = cluster.nodes
    key = await key_on(cluster, source)
    wire = ClusterConnection(parse_redis_url(cluster.url), "{run}", TIMEOUT_S)
    try:
        await wire.send([("SET", key, "1")])
        old = list(wire._owners)

        async def read_map(_: object) -> list[tuple[str, int] | None]:
            return list(old)

        monkeypatch.setattr(wire, "_read_map", read_map)
        await cluster.begin_move(key, source, target)
        await cluster.move_keys(key, source, target)
        await cluster.end_move(key, source, target)
        assert await wire.send([("GET", key)]) == [b"1"]
        assert await wire.send([("UNLINK", key)]) == [1]
    finally:
        wire.close()


async def test_the_documented_rights_are_enough_on_every_node(cluster: LocalCluster, access: RedisAccess) -> None:
    source, target, _ = cluster.nodes
    name = access._run_key.strip("{}").removeprefix("rollmesh:")
    for node in cluster.nodes:
        await node.call(*documented(name, "secret"), "+cluster|slots", "+asking")
    url = cluster.url.replace("://", f"://u-{name}:secret@")
    async with opened(url, access._run_key) as restricted:
        await restricted.check_acl(f"rollmesh:{name}:x")
        key = await key_on(cluster, source, f"rollmesh:{name}:")
        await cluster.begin_move(key, source, target)
        await restricted.batch([("SET", key, "1")])
        assert await restricted.mget([key]) == [b"1"]
        assert [found async for found in restricted.scan(f"rollmesh:{name}:*")] == [key.encode()]
        await restricted.batch([("UNLINK", key)])
        await cluster.end_move(key, source, target)
        async with restricted.subscribed(f"{access._run_key}:wake"):
            pass
        await target.call("ACL", "SETUSER", f"u-{name}", "-unlink")
        with pytest.raises(StoreError, match="run UNLINK"):
            await restricted.batch([("UNLINK", key)])
    for node in cluster.nodes:
        await node.call("ACL", "DELUSER", f"u-{name}")


async def test_the_wrong_kind_of_url_is_named(cluster: LocalCluster, redis_url: str) -> None:
    home = await cluster.owner("{run}")
    async with opened(f"redis://127.0.0.1:{others(cluster, home)[0].port}", "{run}") as access:
        with pytest.raises(StoreError, match="Redis is a cluster") as caught:
            await access.check_acl("payload")
        assert "redis-cluster://" in caught.value.hint
    async with Proxy(redis_url) as proxy, opened(proxy.url("redis-cluster"), "{run}") as access:
        with pytest.raises(StoreError, match="Redis is no cluster") as caught:
            await access.check_acl("payload")
        assert "redis://" in caught.value.hint
