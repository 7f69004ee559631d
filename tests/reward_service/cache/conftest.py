"""A real Redis for scores."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from rollmesh.buffer.redis_backend.embedded import EmbeddedRedis
from rollmesh.mesh.config.scorers.cache import CacheSection


@pytest.fixture(scope="session")
def redis_section(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheSection]:
    """The configuration of a cache in one redis-server, whose password is in a file."""
    server = EmbeddedRedis(tmp_path_factory.mktemp("redis"), durability="none")
    asyncio.run(server.start())
    password = tmp_path_factory.mktemp("key") / "redis.password"
    password.touch(0o600)
    login, _, where = server.admin_url.removeprefix("unix://").rpartition("@")
    user, _, word = login.partition(":")
    password.write_text(word)
    yield CacheSection(redis=f"unix://{user}@{where}", redis_password_file=password, redis_timeout_s=60)
    asyncio.run(server.stop())
