"""The embedded Redis: on a Unix socket and nowhere else, for its user alone, which may do no more than a front does."""

from __future__ import annotations

import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from rollmesh.buffer.redis_backend.access import RedisAccess
from rollmesh.buffer.redis_backend.acl import FRONT_COMMANDS
from rollmesh.buffer.redis_backend.embedded import EmbeddedRedis
from rollmesh.buffer.redis_backend.unix_socket import place_socket, remove_socket
from rollmesh.mesh.config.redis_url import parse_redis_url
from rollmesh.mesh.errors import StoreError
from tests.buffer.test_redis_connection import OPERATIONS
from tests.strangers import reached_by_a_stranger

HARMFUL = (
    ("CONFIG", "SET", "dir", "/tmp"),
    ("CONFIG", "GET", "*"),
    ("MODULE", "LOAD", "/tmp/module.so"),
    ("DEBUG", "SLEEP", "0"),
    ("EVAL", "return 1", "0"),
    ("ACL", "LIST"),
    ("REPLICAOF", "127.0.0.1", "6379"),
    ("SLAVEOF", "127.0.0.1", "6379"),
    ("MIGRATE", "127.0.0.1", "6379", "key", "0", "10"),
    ("MONITOR",),
    ("KEYS", "*"),
    ("SAVE",),
    ("BGSAVE",),
    ("BGREWRITEAOF",),
    ("FLUSHALL",),
    ("SHUTDOWN", "NOSAVE"),
)


async def test_who_connects_may_do_what_a_front_does_and_nobody_else_connects(tmp_path: Path) -> None:
    folder = tmp_path / "a #1?" / "redis"
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    server = EmbeddedRedis(folder, durability="none")
    await server.start()
    try:
        path = Path(parse_redis_url(server.url).path)
        assert (path.parent, stat.S_IMODE(folder.stat().st_mode)) == (folder, 0o700)
        assert (folder / "url").read_text() == server.url
        process = psutil.Process(server.pid)
        assert process.net_connections("inet") == []
        password = str(parse_redis_url(server.admin_url).password)
        assert len(password) == 64
        written = [file.read_text() for file in folder.iterdir() if file.is_file()]
        assert [text for text in (*process.cmdline(), str(process.environ()), *written) if password in text] == []
        access = RedisAccess(server.url, "{run}")
        assert await access.batch([("SET", "key", b"value")]) == [b"OK"]
        for command in HARMFUL:
            with pytest.raises(StoreError, match=r"does not let this user run|unknown command"):
                await access.batch([command])
        await access.close()
        async with Redis.from_url(server.admin_url) as admin:
            assert await admin.get("key") == b"value"
            for command in ("MODULE", "LIST"), ("DEBUG", "SLEEP", "0"):
                with pytest.raises(ResponseError, match="unknown command"):
                    await admin.execute_command(*command)
        tmp_path.chmod(0o755)
        folder.parent.chmod(0o755)
        assert reached_by_a_stranger(tmp_path, [".", str(folder), str(path)]) == ["."]
    finally:
        await server.stop()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where temporary files go: shorter than pytest's own folders."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)


async def test_a_folder_too_deep_for_a_socket_has_it_in_a_short_one_of_its_own(tmp_path: Path, short: Path) -> None:
    deep = tmp_path / ("deep" * 30)
    server = EmbeddedRedis(deep, durability="none")
    await server.start()
    try:
        (private,) = short.iterdir()
        assert Path(parse_redis_url(server.url).path).parent == private
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        # Killed, as its owner may be: the next one is found at the same address.
        again = EmbeddedRedis(deep, durability="none")
        psutil.Process(server.pid).kill()
        await server.wait_until_dead(0)
        await again.start()
        await server.stop()
        assert (again.url, (deep / "url").read_text()) == (server.url, server.url)
        async with Redis.from_url(again.admin_url) as client:
            assert await client.ping()
        await again.stop()
        assert list(short.iterdir()) == []
    finally:
        await server.stop()


def _opened(private: Path) -> None:
    private.chmod(0o770)


def _linked(private: Path) -> None:
    private.rmdir()
    private.symlink_to(private.parent)


def _a_file(private: Path) -> None:
    private.rmdir()
    private.touch()


@pytest.mark.parametrize("prepare", [_opened, _linked, _a_file])
def test_what_others_may_have_made_is_no_place_for_a_socket(
    prepare: Callable[[Path], None], tmp_path: Path, short: Path
) -> None:
    deep = tmp_path / ("deep" * 30)
    deep.mkdir()
    first = place_socket(deep)
    assert first.parent.parent == short
    prepare(first.parent)
    other = place_socket(deep)
    assert other == Path("/tmp", *first.parts[-2:])
    remove_socket(other, deep)


def test_no_place_for_a_socket_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    monkeypatch.setattr("rollmesh.buffer.redis_backend.unix_socket._SHARED", str(tmp_path / "nowhere"))
    deep = tmp_path / ("deep" * 30)
    deep.mkdir()
    with pytest.raises(StoreError, match="no place for its socket") as caught:
        place_socket(deep)
    assert "TMPDIR" in caught.value.hint


def test_the_manual_says_what_fronts_may_do() -> None:
    found = re.search(r"-@all(( |\n)+\+\S+)+", OPERATIONS.read_text())
    assert found is not None
    assert re.findall(r"\+(\S+)", found[0]) == list(FRONT_COMMANDS)
