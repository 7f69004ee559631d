"""A real Redis, and both stores of scores in one form."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from rollmesh.buffer.redis_backend.embedded import EmbeddedRedis


@pytest.fixture(scope="session")
def score_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """One redis-server for the tests of the cache."""
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"), durability="none")
    asyncio.run(server.start())
    yield server
    asyncio.run(server.stop())
