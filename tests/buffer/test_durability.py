"""The promise of each durability level, on a disk that is slow and, when the power is cut, forgets what was not synced.

A small library loaded into redis-server makes every sync take time and notes what has been synced. A power cut is
`kill -9` and cutting the append-only file back to that.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
from redis.asyncio import Redis

from rollmesh.buffer.redis_backend.embedded import Durability, EmbeddedRedis
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import buffer_pb2 as pb
from tests.buffer.mesh_fixture import TIMEOUT_S, Generator, Learner, Mesh, make_config, make_write, refs
from tests.buffer.packed import record_of
from tests.buffer.test_flow import balanced


class Disk:
    """The disk under one redis-server."""

    def __init__(self, folder: Path, library: Path) -> None:
        self._switch, self._synced = folder / "sync_ms", folder / "synced"
        self.environment = {
            "LD_PRELOAD": str(library),
            "SLOW_DISK_SWITCH": str(self._switch),
            "SLOW_DISK_SYNCED": str(self._synced),
        }

    def slow(self, ms: int) -> None:
        """Every sync that begins from now on takes so long."""
        self._switch.write_text(str(ms))

    def cut_power(self, server: EmbeddedRedis) -> int:
        """Ends redis-server, and takes from the disk what was not synced; returns how many bytes that were."""
        os.kill(server.pid, signal.SIGKILL)
        unsynced = self.unsynced()
        for path, (size, _) in unsynced.items():
            os.truncate(path, size)
        return sum(left for _, left in unsynced.values())

    def syncs(self) -> int:
        """Number of those that have ended so far."""
        return len(self._synced.read_text().splitlines())

    def unsynced(self) -> dict[str, tuple[int, int]]:
        """Files that hold more than was synced: bytes that were synced, and those that were not."""
        notes = [line.split(" ", 1) for line in self._synced.read_text().splitlines()]
        sizes = {path: int(size) for size, path in notes if os.path.exists(path)}
        return {p: (size, left) for p, size in sizes.items() if (left := os.path.getsize(p) - size) > 0}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The slow disk, compiled."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc) to build the slow disk with")
    target = tmp_path_factory.mktemp("slow_disk") / "slow_disk.so"
    source = Path(__file__).with_name("slow_disk.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", target, source, "-ldl"], check=True, timeout=240)
    return target


class Store:
    """A redis-server on such a disk."""

    def __init__(self, folder: Path, library: Path, durability: Durability) -> None:
        folder.mkdir()
        self.disk = Disk(folder, library)
        self.server = EmbeddedRedis(folder / "redis", durability=durability, environment=self.disk.environment)

    async def restart(self) -> None:
        await self.server.wait_until_dead(frozen_after_s=0.0)
        self.disk.slow(0)
        await self.server.start()


@pytest.fixture
async def store(tmp_path: Path, library: Path, request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """A started one; its durability is the parameter."""
    store = Store(tmp_path / "store", library, request.param)
    await store.server.start()
    yield store
    store.disk.slow(0)
    await store.server.stop()


class Acknowledged:
    """Writes that the buffer has acknowledged."""

    def __init__(self) -> None:
        self.members: set[tuple[str, int]] = set()
        self.claimed: dict[str, int] = {}
        self.committed = 0


async def work(learner: Learner, generator: Generator, done: Acknowledged) -> None:
    """Seeds, writes, claims and commits, step by step, until the buffer fails; notes what it acknowledges."""
    admission, writer, sampler = generator.admission(), generator.writer(), learner.sampler()
    version = 0
    while True:
        await learner.seed(2 * version + 1, 2 * version + 2)
        serving = PolicyVersion(learner.incarnation, version)
        admission.update(2, serving)
        grants = await generator.grants(admission, 2)
        for member in (0, 1):
            results = await writer.write([make_write(grant, member, [serving]) for grant in grants])
            stored = zip(grants, results, strict=True)
            done.members |= {(g.group_id, member) for g, r in stored if r.status == pb.WRITE_STATUS_STORED}
        groups = await learner.batch(sampler, 2, version)
        response = await learner.client.claim("train", learner.incarnation, version, refs(groups))
        assert response.claimed
        done.claimed |= {g.group_id: version for g in groups}
        learner.log.used(groups, version)
        version += 1
        learner.version = version
        await learner.client.set_policy_version(learner.incarnation, version)
        if version % 3 == 0:
            await learner.client.commit("train", learner.incarnation, version)
            done.committed = version


async def missing(store: Store, run: str, done: Acknowledged) -> list[str]:
    """Acknowledged writes that are not there, in words; asked of Redis before any member can mend anything."""
    async with Redis.from_url(store.server.admin_url) as client:
        key = f"{{rollmesh:{run}}}"
        mark = int(await client.hget(key, "committed") or 0)
        found = [] if mark >= done.committed else [f"commit {done.committed}"]
        names = {gid for gid, _ in done.members}
        packed: dict[str, Any] = {gid: await client.hget(f"{key}:train:g:{gid}", "group") for gid in sorted(names)}
        counters = await client.hget(f"{key}:train", "counters")
    # A stalled disk may have kept nothing at all.
    trained = 0 if counters is None else msgpack.unpackb(counters)["trained"]
    groups = {gid: record_of(value) for gid, value in packed.items() if value is not None}
    ended = [gid for gid in names if gid not in groups]
    # A group that is gone must have been trained.
    found += [f"group {gid}" for gid in ended if done.claimed.get(gid, mark) >= mark]
    found += [f"{len(ended)} groups ended, {trained} are counted"] if len(ended) > trained else []
    found += [
        f"member {m} of {g}" for g, m in sorted(done.members) if g in groups and groups[g]["done"][m : m + 1] != "1"
    ]
    claimed = {gid: version for gid, version in done.claimed.items() if gid in groups}
    return found + [f"claim of {gid}" for gid, version in claimed.items() if version not in (groups[gid]["uses"] or [])]


@asynccontextmanager
async def working(store: Store, folder: Path, done: Acknowledged) -> AsyncIterator[tuple[str, asyncio.Task[None]]]:
    """A run of its own on the store, at work: its name, and the task that notes what is acknowledged."""
    mesh = Mesh(store.server.url, folder)
    front = await mesh.front(make_config(folder, store.server.url))
    learner, generator = await mesh.learner(front), await mesh.generator(front)
    worker = asyncio.create_task(work(learner, generator, done))
    try:
        yield front.run_name, worker
        worker.cancel()
        await asyncio.gather(worker, return_exceptions=True)
        if store.server.pid:
            await balanced(learner)
    finally:
        await mesh.close()


async def until_written(worker: asyncio.Task[None], done: Acknowledged, members: int) -> None:
    """Waits until a number of members was acknowledged in all."""
    async with asyncio.timeout(TIMEOUT_S):
        while len(done.members) < members:
            assert not worker.done(), worker.exception()
            await asyncio.sleep(0.001)


async def until_a_sync_hangs(disk: Disk) -> None:
    """Waits until what is not synced stays so: a sync that had begun before may still end."""
    before, times = disk.unsynced(), 0
    async with asyncio.timeout(TIMEOUT_S):
        while times < 20:
            await asyncio.sleep(0.01)
            now = disk.unsynced()
            before, times = now, times + 1 if now and now == before else 0


@pytest.mark.parametrize("store", ["always"], indirect=True)
async def test_always_keeps_every_acknowledged_verb_through_power_cuts(store: Store, tmp_path: Path) -> None:
    runs: dict[str, Acknowledged] = {}
    for members, ms in ((30, 1), (17, 3), (26, 0)):
        done = Acknowledged()
        store.disk.slow(ms)
        async with working(store, tmp_path, done) as (run, worker):
            await until_written(worker, done, members)
            if not ms:
                # The last one comes in the middle of a sync.
                store.disk.slow(60_000)
                await until_a_sync_hangs(store.disk)
            lost = store.disk.cut_power(store.server)
            assert ms or lost, "something was written, not synced, and not acknowledged"
            worker.cancel()
            await store.restart()
            runs[run] = done
            for name, acknowledged in runs.items():
                assert await missing(store, name, acknowledged) == []
    assert all(done.claimed for done in runs.values())
    assert any(done.committed for done in runs.values())


@pytest.mark.parametrize("store", ["always"], indirect=True)
async def test_always_syncs_before_each_answer_and_once_for_what_arrives_together(store: Store) -> None:
    async with Redis.from_url(store.server.admin_url) as client:
        await client.set("first", 1)
        began = store.disk.syncs()
        for number in range(10):
            await client.set(f"key{number}", 1)
        alone = store.disk.syncs()
        assert alone - began >= 10, "one acknowledgement, one sync"
        pipe = client.pipeline(transaction=False)
        for number in range(2000):
            pipe.set(f"key{number}", 2)
        await pipe.execute()
        assert store.disk.syncs() - alone < 200, "what arrives together is synced together"


@pytest.mark.parametrize("store", ["everysec"], indirect=True)
async def test_everysec_loses_acknowledged_verbs_behind_a_stalled_disk(store: Store, tmp_path: Path) -> None:
    done = Acknowledged()
    async with working(store, tmp_path, done) as (run, worker):
        await until_written(worker, done, 4)
        store.disk.slow(60_000)
        async with Redis.from_url(store.server.admin_url) as client:
            async with asyncio.timeout(TIMEOUT_S):
                # A sync that does not end has begun: Redis puts its writes off, for two seconds.
                while not (await client.info("persistence"))["aof_pending_bio_fsync"]:
                    await asyncio.sleep(0.005)
        await until_written(worker, done, len(done.members) + 4)
        os.kill(store.server.pid, signal.SIGKILL)
        worker.cancel()
        await store.restart()
        assert await missing(store, run, done)


@pytest.mark.parametrize("store", ["none"], indirect=True)
async def test_none_keeps_nothing(store: Store) -> None:
    async with Redis.from_url(store.server.admin_url) as client:
        await client.set("key", 1)
    os.kill(store.server.pid, signal.SIGKILL)
    await store.restart()
    async with Redis.from_url(store.server.admin_url) as client:
        assert await client.get("key") is None


async def test_a_script_whose_end_was_torn_off_is_done_wholly_or_not_at_all_at_any_later_start(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path, durability="always")
    script = "for i = 1, 5 do redis.call('HINCRBY', KEYS[1], i, 1) end"

    async def files() -> dict[Path, int]:
        return {path: path.stat().st_size for path in tmp_path.rglob("*.aof")}

    async def does(key: str) -> None:
        async with Redis.from_url(server.admin_url) as client:
            await client.eval(script, 1, key)

    async def killed() -> None:
        os.kill(server.pid, signal.SIGKILL)
        await server.wait_until_dead(0)
        await server.stop()

    await server.start()
    await does("before")
    sizes = await files()
    await does("torn")
    await killed()
    (path, grown) = next((path, size) for path, size in (await files()).items() if size > sizes[path])
    os.truncate(path, (sizes[path] + grown) // 2)
    await server.start()
    await does("after")
    await killed()
    await server.start()
    async with Redis.from_url(server.admin_url) as client:
        assert {key: await client.hlen(key) for key in ("before", "torn", "after")} == {
            "before": 5,
            "torn": 0,
            "after": 5,
        }
    await server.stop()
