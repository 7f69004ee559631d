"""Redis starts on what a snapshot had; what it acknowledged after that is lost, and nothing else."""

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from rollmesh.buffer.redis_backend.embedded import find_redis_server
from tests.faults.redis_disk import Durability, RedisDisk
from tests.faults.world import free_port


@contextmanager
def started(disk: RedisDisk) -> Iterator[redis.Redis]:
    """A server on the disk; killed at the end."""
    port = free_port()
    disk.before_start()
    server = subprocess.Popen(
        [find_redis_server(), "--port", str(port), "--bind", "127.0.0.1", *disk.options()], stdout=subprocess.DEVNULL
    )
    retry = redis.retry.Retry(redis.backoff.ConstantBackoff(0.05), 200)
    errors = [redis.exceptions.ConnectionError, redis.exceptions.BusyLoadingError]
    try:
        with redis.Redis(port=port, retry=retry, retry_on_error=errors) as client:
            client.ping()
            yield client
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()


@pytest.mark.parametrize("rewritten", [False, True], ids=["grown", "rewritten"])
def test_what_comes_after_the_snapshot_is_lost(tmp_path: Path, rewritten: bool) -> None:
    disk = RedisDisk(tmp_path, "always")
    with started(disk) as client:
        client.set("kept", 1)
        since, before = disk.snapshot(), time.time()
        client.set("lost", 2)
        after = time.time()
        if rewritten:
            client.bgrewriteaof()
            while client.info("persistence")["aof_rewrite_in_progress"] or (tmp_path / "appendonly.aof").samefile(
                tmp_path / "snapshot.aof"
            ):
                time.sleep(0.01)
    disk.lose(since)
    with started(disk) as client:
        assert (client.get("kept"), client.get("lost")) == (b"1", None)
        client.set("later", 3)
    (loss,) = disk.losses
    assert loss.covers(before)
    assert loss.covers(after)
    assert not loss.covers(time.time())
    with started(disk) as client:
        assert client.get("later") == b"3", "a loss happens once"


@pytest.mark.parametrize("durability", ["always", "everysec"])
def test_an_emptied_redis_and_what_an_ordinary_end_may_cost(tmp_path: Path, durability: Durability) -> None:
    disk = RedisDisk(tmp_path, durability)
    with started(disk) as client:
        client.set("lost", 1)
    assert disk.losses == []
    disk.empty()
    with started(disk) as client:
        assert client.keys() == []
        client.set("kept", 1)
    with started(disk) as client:
        assert client.get("kept") == b"1"
    # Everything until then; and with `everysec` what had not been written when the process died.
    assert len(disk.losses) == {"always": 1, "everysec": 2}[durability]
    assert disk.losses[0].began == 0.0
