"""A real redis-server per test session, real fronts per test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from buffer.redis_server import RedisServer
from tests.buffer.mesh_fixture import Mesh


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One redis-server for all tests that do not kill it; each test has its own run name."""
    server = RedisServer(tmp_path_factory.mktemp("redis"), durability="everysec")
    asyncio.run(server.start())
    yield server.url
    asyncio.run(server.stop())


@pytest.fixture
async def mesh(redis_url: str, tmp_path: Path) -> AsyncIterator[Mesh]:
    """Factory and owner of fronts, clients and members."""
    owner = Mesh(redis_url, tmp_path)
    yield owner
    await owner.close()
