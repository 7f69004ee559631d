"""The embedded Redis on its Unix socket, and where there can be none."""

from __future__ import annotations

import stat
from pathlib import Path

from redis.asyncio import Redis

from buffer.redis_access import RedisAccess
from buffer.redis_server import RedisServer


async def test_the_socket_is_the_same_server_and_for_its_user_alone(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, durability="none")
    await server.start()
    try:
        access = RedisAccess(server.local_url, "{run}")
        assert await access.batch([("SET", "key", b"value")]) == [b"OK"]
        await access.close()
        async with Redis.from_url(server.url) as client:
            assert await client.get("key") == b"value"
        found = next(path.stat().st_mode for path in tmp_path.iterdir() if stat.S_ISSOCK(path.stat().st_mode))
        assert stat.S_IMODE(found) == 0o700
    finally:
        await server.stop()


async def test_a_folder_too_deep_for_a_socket_is_served_over_tcp(tmp_path: Path) -> None:
    server = RedisServer(tmp_path / ("deep" * 30), durability="none")
    await server.start()
    try:
        assert server.local_url == server.url
        async with Redis.from_url(server.url) as client:
            assert await client.ping()
    finally:
        await server.stop()
