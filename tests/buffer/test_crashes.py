"""kill -9 of Redis and of the front's process, Redis that refuses writes, and what else can be wrong at the start."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from redis.asyncio import Redis

from rollmesh.buffer.redis_backend.embedded import EmbeddedRedis
from rollmesh.buffer.server.process import BufferFront
from rollmesh.mesh.errors import ConfigError, PortInUseError, RunBusyError, StoreError
from rollmesh.mesh.liveness.process_ends import survivors
from rollmesh.mesh.trajectory.versions import PolicyVersion
from tests.buffer.front_processes import FrontProcess
from tests.buffer.mesh_fixture import START_S, TIMEOUT_S, Generator, Learner, Mesh, make_config, make_write
from tests.buffer.test_flow import balanced


async def train_for(learner: Learner, generator: Generator, first: int, last: int) -> set[str]:
    """Trains versions first..last, whatever happens to the services meanwhile; returns the groups claimed."""
    admission, writer, sampler = generator.admission(), generator.writer(), learner.sampler()
    claimed: set[str] = set()

    async def generate() -> None:
        async for grant in admission:
            serving = PolicyVersion(learner.incarnation, grant.version_floor)
            await writer.write([make_write(grant, m, [serving]) for m in range(2) if m not in grant.members_done])
            admission.update(4)

    worker = asyncio.create_task(generate())
    try:
        for version in range(first, last + 1):
            admission.update(4, PolicyVersion(learner.incarnation, version))
            groups = await learner.batch(sampler, 2, version)
            ids = {g.group_id for g in groups}
            assert not ids & claimed, "no group is trained twice"
            assert (await learner.train(groups, version)).claimed
            claimed |= ids
    finally:
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
    return claimed


async def test_a_killed_redis_comes_back_with_every_acknowledged_write(mesh: Mesh) -> None:
    # On a busy machine streams come back late: what they hold is not to be lost meanwhile.
    front = await mesh.front(make_config(mesh.folder, buffer={"lease_s": 60.0, "reconnect_grace_s": 60.0}))
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 100)
    assert front.redis is not None
    run = asyncio.create_task(train_for(learner, generator, 0, 29))
    for _ in range(2):
        before = (await learner.client.describe("train")).next_train_version
        os.kill(front.redis.pid, signal.SIGKILL)
        async with asyncio.timeout(TIMEOUT_S):
            while not run.done() and (await learner.client.describe("train")).next_train_version < before + 5:
                await asyncio.sleep(0.02)
    claimed = await run
    assert len(claimed) == 60
    counts = await balanced(learner)
    assert (counts.consumed, counts.evicted_stale, counts.failed) == (60, 0, 0)


async def test_a_stopped_redis_is_replaced_and_has_every_acknowledged_write(mesh: Mesh) -> None:
    front = await mesh.front(make_config(mesh.folder, resources={"frozen_after_s": 1.0}))
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 100)
    assert front.redis is not None
    claimed = await train_for(learner, generator, 0, 9)
    os.kill(front.redis.pid, signal.SIGSTOP)
    claimed |= await train_for(learner, generator, 10, 19)
    assert len(claimed) == 40
    counts = await balanced(learner)
    assert (counts.consumed, counts.evicted_stale, counts.failed) == (40, 0, 0)


async def test_a_restart_of_redis_gives_every_lease_a_full_term(mesh: Mesh) -> None:
    front = await mesh.front(make_config(mesh.folder, mesh.redis_url))
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    await learner.seed(1, 1)
    admission = generator.admission()
    admission.update(1, PolicyVersion(1, 0))
    await generator.grants(admission, 1)
    run = f"{{rollmesh:{front.run_name}}}"
    redis, me = front.access.client, generator.agent.member_id
    # As after a restart: another run id than the one noted, and a lease that ran out meanwhile.
    pipeline = redis.pipeline(transaction=True)
    pipeline.hset(run, "redis_run_id", "before the restart").zadd(f"{run}:train:holders", {me: 1})
    await pipeline.execute()
    async with asyncio.timeout(TIMEOUT_S):
        while await redis.zscore(f"{run}:train:holders", me) == 1:
            await asyncio.sleep(0.02)
    counts = await balanced(learner)
    assert (counts.generating, counts.readmissions) == (1, 0)
    assert not await redis.zcard(f"{run}:train:orphans:")


async def test_redis_that_is_full_refuses_with_a_hint_and_recovers(mesh: Mesh) -> None:
    front = await mesh.front(make_config(mesh.folder))
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    learner.client._retry_s = 0.5
    await learner.seed(1, 4)
    admission, writer, sampler = generator.admission(), generator.writer(), learner.sampler()
    admission.update(2, PolicyVersion(1, 0))
    grants = await generator.grants(admission, 2)
    await writer.write([make_write(g, m, [PolicyVersion(1, 0)]) for g in grants for m in range(2)])
    groups = await learner.batch(sampler, 2, 0)
    assert front.redis is not None
    async with Redis.from_url(front.redis.admin_url) as admin:
        await admin.config_set("maxmemory", 1)
    with pytest.raises(StoreError, match="refuses writes") as caught:
        await learner.seed(5, 6)
    assert "maxmemory" in caught.value.hint
    assert (await learner.train(groups, 0)).claimed, "what frees, or keeps what there is, still works"
    assert (await learner.client.commit("train", 1, 1, "path")).trained == 2
    await generator.agent.heartbeat()
    async with Redis.from_url(front.redis.admin_url) as admin:
        await admin.config_set("maxmemory", 0)
    assert (await learner.seed(5, 6)).added == 2
    await balanced(learner)


async def test_redis_away_for_longer_than_the_patience_is_a_typed_error(mesh: Mesh, tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / "redis")
    await server.start()
    try:
        learner = await mesh.learner(await mesh.front(make_config(tmp_path, server.url)))
        await server.stop()
        learner.client._retry_s = 0.3
        with pytest.raises(StoreError, match="unreachable"):
            await learner.client.describe("train")
        await server.start()
        learner.client._retry_s = TIMEOUT_S
        await balanced(learner)
    finally:
        await server.stop()


async def test_a_stopped_redis_does_not_outlive_its_front(mesh: Mesh, process: FrontProcess) -> None:
    await process.start()
    learner = await mesh.learner(process)
    learner.client._retry_s = START_S
    await learner.seed(1, 60)
    (redis,) = process.children()
    redis.suspend()
    try:
        await process.end(signal.SIGKILL)
        await process.start()
        assert survivors([redis.pid]) == set()
        assert (await learner.client.describe("train")).counts.pending == 60
    finally:
        with suppress(psutil.NoSuchProcess):
            redis.kill()


async def test_a_redis_that_cannot_be_reached_stops_the_start(tmp_path: Path) -> None:
    service = BufferFront(make_config(tmp_path, "redis://127.0.0.1:1/0"), host="127.0.0.1", port=0)
    with pytest.raises(StoreError, match="unreachable"):
        await service.start()


async def test_a_taken_port_stops_the_start(tmp_path: Path, redis_url: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        service = BufferFront(make_config(tmp_path, redis_url), host="127.0.0.1", port=taken.getsockname()[1])
        with pytest.raises(PortInUseError):
            await service.start()


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "asked to end"])
async def test_a_stopped_child_of_a_dead_redis_keeps_no_folder(
    tmp_path: Path, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the one that writes the append-only file again, which inherits all that the server has open."""
    monkeypatch.setattr("rollmesh.buffer.redis_backend.embedded._STOP_S", 1.0)
    server = EmbeddedRedis(tmp_path)
    await server.start()
    async with Redis.from_url(server.admin_url) as client:
        await client.set("kept", "value")
        # Writes each key for so long that the child is still there when it is stopped.
        await client.config_set("rdb-key-save-delay", 60_000_000)
        await client.bgrewriteaof()
    (child,) = psutil.Process(server.pid).children()
    child.suspend()
    try:
        if killed:
            os.kill(server.pid, signal.SIGKILL)
            await server.wait_until_dead(0)
        else:
            await server.stop()
            assert survivors([child.pid], 10) == set()
        await server.start()
        assert survivors([child.pid], 10) == set()
        async with Redis.from_url(server.admin_url) as client:
            assert await client.get("kept") == b"value"
    finally:
        await server.stop()
        with suppress(psutil.NoSuchProcess):
            child.kill()


async def test_one_redis_owns_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmesh.buffer.redis_backend.folder_lock._PATIENCE_S", 0.2)
    first, second = EmbeddedRedis(tmp_path), EmbeddedRedis(tmp_path)
    await first.start()
    try:
        with pytest.raises(RunBusyError, match="another redis-server"):
            await second.start()
    finally:
        await first.stop()
    await second.start()
    await second.stop()
    assert second.url == first.url, "other fronts continue at the address that they have"


async def test_a_redis_that_says_nothing_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was stopped in its start, or reads from a disk that hangs."""
    silent = tmp_path / "redis-server"
    silent.write_text("#!/bin/sh\nexec sleep 600\n")
    silent.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as listener:

        def listen_first() -> str:
            # It listens before the server's first second begins, however long a process takes to start here.
            listener.bind(str(server._socket_path()))
            listener.listen()
            return str(silent)

        monkeypatch.setattr("rollmesh.buffer.redis_backend.embedded.find_redis_server", listen_first)
        monkeypatch.setattr("rollmesh.buffer.redis_backend.embedded._START_S", 1.0)
        server = EmbeddedRedis(tmp_path / "redis")
        try:
            with pytest.raises(StoreError, match=r"is not ready after 1 s: .*Timeout reading"):
                await server.start()
        finally:
            await server.stop()


async def test_broken_data_is_reported_with_the_log(tmp_path: Path) -> None:
    (tmp_path / "appendonly.aof").write_bytes(b"nonsense\n" * 100)
    with pytest.raises(StoreError, match=r"redis-server ended|appendonly|AOF") as caught:
        await EmbeddedRedis(tmp_path).start()
    assert "redis.log" in caught.value.hint


async def test_a_key_that_is_not_there_is_named_before_redis_is_started(tmp_path: Path) -> None:
    config = make_config(tmp_path, security={"metrics_key_file": str(tmp_path / "none")})
    with pytest.raises(ConfigError, match=r"security\.metrics_key_file"):
        await BufferFront(config, host="127.0.0.1", port=0).start()
    assert not (config.run.folder / "redis").exists()


async def test_a_full_disk_is_named_where_redis_ends_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log has no room for the reason."""
    front = BufferFront(make_config(tmp_path), host="127.0.0.1", port=0)
    await front.start()
    try:
        assert front.redis is not None
        broken = tmp_path / "redis-server"
        broken.write_text("#!/bin/sh\necho 20128:M Running mode=\nexit 1\n")
        broken.chmod(0o700)
        monkeypatch.setattr("rollmesh.buffer.redis_backend.embedded.find_redis_server", lambda: str(broken))
        monkeypatch.setattr("rollmesh.buffer.server.process._RESTARTS", 1)
        room = shutil.disk_usage(tmp_path)
        monkeypatch.setattr("shutil.disk_usage", lambda _path: room._replace(free=12 << 10))
        os.kill(front.redis.pid, signal.SIGKILL)
        async with asyncio.timeout(TIMEOUT_S):
            error = await front.failed()
        assert "died 1 times in 600 s, at last: redis-server ended with code 1: the disk of" in error.message
        assert "12 KiB are free" in error.message
        assert "free space" in error.hint
    finally:
        await front.stop()


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[FrontProcess]:
    front = FrontProcess(tmp_path, make_config(tmp_path, network={"retry_s": START_S}))
    yield front
    await front.end(signal.SIGKILL)


async def test_a_killed_front_process_is_replaced_in_the_middle_of_a_run(mesh: Mesh, process: FrontProcess) -> None:
    await process.start()
    learner, generator = await mesh.learner(process), await mesh.generator(process)
    for actor in (learner, generator):
        actor.client._retry_s = START_S
    await learner.seed(1, 60)
    run = asyncio.create_task(train_for(learner, generator, 0, 19))
    async with asyncio.timeout(TIMEOUT_S):
        while (await learner.client.describe("train")).next_train_version < 3:
            await asyncio.sleep(0.02)
    (redis,) = process.children()
    await process.end(signal.SIGKILL)
    assert await asyncio.to_thread(survivors, [redis.pid], 240) == set(), "no orphan is left"
    await process.start()
    async with asyncio.timeout(START_S):
        claimed = await run
    assert len(claimed) == 40
    counts = await balanced(learner)
    assert (counts.consumed, counts.failed, counts.evicted_stale) == (40, 0, 0)


async def test_the_process_ends_in_order_and_the_run_goes_on_where_it_was(mesh: Mesh, process: FrontProcess) -> None:
    await process.start()
    learner, generator = await mesh.learner(process), await mesh.generator(process)
    await learner.seed(1, 4)
    await train_for(learner, generator, 0, 0)
    await learner.client.commit("train", 1, 1, "checkpoint-1")
    (redis,) = process.children()
    assert await process.end(signal.SIGTERM) == 0
    assert survivors([redis.pid]) == set()
    await process.start()
    description = await learner.client.describe("train")
    assert (description.latest_checkpoint, description.committed_version) == ("checkpoint-1", 1)
    assert (description.policy.version, description.counts.trained) == (1, 2)
    successor = await mesh.learner(process, 1, takeover=True)
    assert successor.incarnation == 2
