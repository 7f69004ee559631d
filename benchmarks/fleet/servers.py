"""The measured servers of a cell: one Redis or a cluster, and fronts in processes of their own."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import psutil
import redis

from benchmarks.buffer import front
from benchmarks.fleet.pipes import MeasurementError
from benchmarks.fleet.scenario import Scenario
from rollmesh.buffer.redis_backend.embedded import EmbeddedRedis
from tests.buffer.redis_cluster import LocalCluster

RUN = "fleet"
_READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Usage:
    """The CPU time that a process has used, and the memory and files that it holds.

    Attributes:
        cpu_s: seconds of CPU since its start.
        rss_mb: resident memory, in MiB.
        files: open files, of which nearly all are connections.
    """

    cpu_s: float
    rss_mb: float
    files: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        process = psutil.Process(pid)
        times = process.cpu_times()
        return cls(times.user + times.system, process.memory_info().rss / 2**20, process.num_fds())


class Servers:
    """Redis and fronts; `start` them, `stop` them.

    Args:
        scenario: of the cell.
        folder: an empty one.
        profile: a folder for the fronts' profiles (cProfile), if wanted.
    """

    def __init__(self, scenario: Scenario, folder: Path, profile: Path | None = None) -> None:
        self._scenario = scenario
        self._folder = folder
        self._profile = profile
        self._exit = ExitStack()
        self._context = multiprocessing.get_context("spawn")
        self._fronts: list[SpawnProcess] = []
        self._redis_pids: list[int] = []
        self.mesh = ""
        self.client: Any = None

    def __enter__(self) -> Servers:
        try:
            url = self._start_cluster() if self._scenario.cluster else self._start_redis()
            addresses = [self._start_front(url, number) for number in range(self._scenario.fronts)]
        except BaseException:
            self._exit.close()
            raise
        self.mesh = ",".join(addresses)
        return self

    def __exit__(self, *_: object) -> None:
        self._exit.close()

    def _start_redis(self) -> str:
        server = EmbeddedRedis(self._folder / "redis")
        self._exit.callback(lambda: asyncio.run(server.stop()))
        asyncio.run(server.start())
        self._redis_pids = [server.pid]
        self.client = redis.Redis.from_url(server.admin_url)
        return server.url

    def _start_cluster(self) -> str:
        cluster = LocalCluster(self._folder / "cluster")
        self._folder.joinpath("cluster").mkdir()
        self._exit.callback(cluster.stop)

        async def start() -> None:
            await cluster.start()
            await cluster.disconnect()

        asyncio.run(start())
        ports = {node.port for node in cluster.nodes}
        self._redis_pids = [
            child.pid
            for child in psutil.Process(os.getpid()).children(recursive=True)
            if child.name() == "redis-server" and any(str(port) in " ".join(child.cmdline()) for port in ports)
        ]
        self.client = redis.RedisCluster(host="127.0.0.1", port=cluster.nodes[0].port)
        return cluster.url

    def _start_front(self, url: str, number: int) -> str:
        ready = self._folder / f"front-{number}.json"
        profile = None if self._profile is None else self._profile / f"front-{number}.prof"
        process = self._context.Process(target=front.serve, args=(self._settings(url), ready, profile))
        process.start()
        self._fronts.append(process)
        self._exit.callback(_end, process)
        deadline = time.monotonic() + _READY_S
        while not ready.exists():
            if not process.is_alive() or time.monotonic() > deadline:
                raise MeasurementError("a front did not start", hint="its log is on the terminal")
            time.sleep(0.02)
        return str(json.loads(ready.read_text(encoding="utf-8"))["address"])

    def _settings(self, url: str) -> dict[str, Any]:
        """The run's configuration: default order and durability, a staleness bound that throttles nothing."""
        return {
            "model": {"path": "none"},
            "data": {"train": "none"},
            "run": {"dir": str(self._folder), "name": RUN},
            "rollout": {"n": self._scenario.n},
            "learner": {"batch": {"groups": self._scenario.groups_per_step}},
            "buffer": {
                "redis": url,
                "max_staleness": 1_000_000,
                "max_bytes": 4 << 30,
                "lease_s": self._scenario.lease_s,
            },
        }

    def usage(self) -> dict[str, list[Usage]]:
        """Usage of Redis and of the fronts."""
        pids: dict[str, Sequence[int | None]] = {"redis": self._redis_pids, "front": [p.pid for p in self._fronts]}
        return {role: [Usage.of(pid) for pid in found if pid is not None] for role, found in pids.items()}


def _end(process: SpawnProcess) -> None:
    process.terminate()
    process.join(20)
    if process.is_alive():
        process.kill()
        process.join()
