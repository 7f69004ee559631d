"""A real redis-server per test session, real fronts per test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rollmesh.buffer.redis_backend.embedded import EmbeddedRedis
from rollmesh.buffer.server import admit_session, background_tasks, sample_session
from tests.buffer.mesh_fixture import Mesh
from tests.buffer.redis_cluster import LocalCluster


@pytest.fixture(autouse=True)
def _fronts_look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front of this process soon tells and does that for which nothing wakes it."""
    for module in (admit_session, background_tasks, sample_session):
        monkeypatch.setattr(module, "_RECHECK_S", 0.1)
    for interval in ("_ENDED_S", "_MEMBERS_S", "_RECONNECT_S"):
        monkeypatch.setattr(background_tasks, interval, 0.1)


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One redis-server for all tests that do not kill it, with all rights; each test has its own run name."""
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"), durability="everysec")
    asyncio.run(server.start())
    yield server.admin_url
    asyncio.run(server.stop())


@pytest.fixture(scope="session")
def redis_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """One Redis Cluster; who breaks it mends it."""
    cluster = LocalCluster(tmp_path_factory.mktemp("cluster"))

    async def start() -> None:
        await cluster.start()
        await cluster.disconnect()

    asyncio.run(start())
    yield cluster
    cluster.stop()


@pytest.fixture
def store_url(request: pytest.FixtureRequest) -> str:
    """The Redis of `mesh`; a fixture without a loop of its own, since servers are started outside of any."""
    parameters = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if parameters.get("mesh") == "cluster":
        cluster: LocalCluster = request.getfixturevalue("redis_cluster")
        return cluster.url
    url: str = request.getfixturevalue("redis_url")
    return url


@pytest.fixture
async def mesh(store_url: str, tmp_path: Path) -> AsyncIterator[Mesh]:
    """Factory and owner of fronts, clients and members, on one Redis or, by indirect parameter, on a `cluster`."""
    owner = Mesh(store_url, tmp_path)
    yield owner
    await owner.close()
