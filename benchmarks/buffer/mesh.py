"""Our side of a measurement: the real buffer service in its own process, writers and a learner in theirs.

CPU seconds of each process and Redis' own count of its commands are taken over the measured window alone. So a cell
also says what a trajectory costs, which a noisy machine changes less than its rate.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import psutil
import redis

from benchmarks.buffer import front, load_processes
from benchmarks.buffer.plan import Plan
from rollmesh.launcher.run_secrets import TOKEN, make_secrets
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import RollmeshError

_READY_S = 60.0
_FILL_S = 900.0
# Batches that a measured window has at least, and its length in seconds at most.
_LEAST_CLAIMS = 4
_LONGEST_S = 30.0
_ROLES = ("front", "redis", "writers", "learner")


class MeasurementError(RollmeshError):
    """A process of the measured system failed."""

    code = "measurement"


@dataclass(frozen=True, slots=True)
class Cell:
    """Results of a run.

    Attributes:
        items_s: trajectories claimed per second in the window.
        p50_ms, p99_ms: from the beginning of the insertion to the learner's hand.
        payload_bytes: of one trajectory.
        cpu_us: CPU microseconds per trajectory, by process.
        redis_us: microseconds of Redis' own time per trajectory, by command, largest first.
        balanced: the ledger agreed with a recount, and nothing was claimed twice or lost.
        latencies_ms: every sample of a paced run.
    """

    items_s: float
    p50_ms: float
    p99_ms: float
    payload_bytes: int
    cpu_us: dict[str, float]
    redis_us: dict[str, float]
    balanced: bool
    latencies_ms: list[float]


def settings(plan: Plan, folder: Path) -> dict[str, Any]:
    """The run's configuration: FIFO, each group once, a staleness bound that throttles nothing."""
    return {
        "model": {"path": "none"},
        "data": {"train": "none"},
        "run": {"dir": str(folder), "name": "benchmark"},
        "security": security(plan, folder).model_dump(mode="json"),
        "rollout": {"n": plan.group},
        "learner": {"batch": {"groups": plan.groups_per_step}},
        "buffer": {
            "order": "fifo",
            "min_members": 1,
            "max_staleness": 1_000_000,
            "max_bytes": 4 << 30,
            "durability": plan.durability,
        },
    }


def security(plan: Plan, folder: Path) -> SecuritySection:
    """With the token that `folder` holds, where the plan wants one."""
    return SecuritySection(token_file=folder / TOKEN) if plan.checked else SecuritySection()


class Mesh:
    """The processes of one cell; `measure` runs it.

    Args:
        plan: what to run.
        folder: an empty one for Redis' files.
        profile: a file for the front's profile (cProfile), if wanted.
    """

    def __init__(self, plan: Plan, folder: Path, profile: Path | None = None) -> None:
        self._plan = plan
        self._folder = folder
        self._profile = profile
        self._context = multiprocessing.get_context("spawn")
        self._processes: list[SpawnProcess] = []
        self._front: SpawnProcess | None = None

    def _start(self, target: Any, *arguments: Any) -> tuple[Connection, SpawnProcess]:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        return ours, process

    def __enter__(self) -> Mesh:
        try:
            self._start_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start_all(self) -> None:
        if self._plan.checked:
            make_secrets(self._folder)
        ready = self._folder / "ready.json"
        service = self._context.Process(
            target=front.serve, args=(settings(self._plan, self._folder), ready, self._profile)
        )
        service.start()
        self._front = service
        self.address = _wait_ready(ready, service)
        self._claims = self._context.Value("q", 0)
        access = security(self._plan, self._folder)
        self._learner, learner = self._start(load_processes.learner, self.address, access, self._plan, self._claims)
        self._writers = [
            self._start(load_processes.writer, self.address, access, self._plan, number)
            for number in range(self._plan.writers)
        ]
        incarnation = _receive(self._learner)
        for conn, _ in self._writers:
            _receive(conn)
        children = psutil.Process(service.pid).children(recursive=True)
        self._redis = next(child for child in children if child.name() == "redis-server")
        self._client = redis.Redis.from_url((self._folder / "benchmark" / "redis" / "url").read_text(encoding="utf-8"))
        self._watched = {
            "front": [psutil.Process(service.pid)],
            "redis": [self._redis],
            "writers": [psutil.Process(process.pid) for _, process in self._writers],
            "learner": [psutil.Process(learner.pid)],
        }
        self.empty_bytes = self.used_bytes()
        for conn, _ in self._writers:
            conn.send(incarnation)

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.terminate()
            process.join(10)
        if self._front is not None:
            self._front.terminate()
            self._front.join(20)

    def used_bytes(self) -> int:
        """Redis' `used_memory`."""
        return int(self._client.info("memory")["used_memory"])

    def _cpu(self) -> dict[str, float]:
        times = {}
        for role in _ROLES:
            used = [process.cpu_times() for process in self._watched[role]]
            times[role] = sum(t.user + t.system for t in used)
        return times

    def filled(self) -> dict[str, float]:
        """Waits until the table is as full as the plan says: seconds that took, payload bytes stored."""
        return dict(_receive(self._learner, _FILL_S))

    def measure(self) -> Cell:
        """One measured window after the warm-up; the cell ends with it."""
        if self._plan.fill:
            self._learner.send("begin")
        time.sleep(self._plan.warmup)
        done = self._client.info("commandstats")
        before, began = self._cpu(), time.time()
        first = self._claims.value
        time.sleep(self._plan.seconds)
        # A slow machine gets the time that a few batches need.
        while self._claims.value < first + _LEAST_CLAIMS and time.time() < began + _LONGEST_S:
            time.sleep(0.05)
        ended, after = time.time(), self._cpu()
        commands = self._client.info("commandstats")
        self._learner.send("end")
        measured = _receive(self._learner)
        written = []
        for conn, _ in self._writers:
            conn.send("end")
            written.append(_receive(conn))
        inside = [(at, count) for at, count in measured["claims"] if began <= at < ended]
        if len(inside) < 2:
            raise MeasurementError("fewer than two batches were claimed in the window", hint="measure for longer")
        items = inside[-1][1] - inside[0][1]
        span = inside[-1][0] - inside[0][0]
        rate = items / span
        expected = rate * (ended - began)
        stamps = zip(measured["came"], measured["took"], strict=True)
        latencies = sorted(latency for at, latency in stamps if began <= at < ended)
        redis_us = {
            name.removeprefix("cmdstat_"): round((stats["usec"] - done.get(name, {}).get("usec", 0)) / expected, 2)
            for name, stats in commands.items()
        }
        return Cell(
            items_s=rate,
            p50_ms=quantile(latencies, 0.50) * 1e3,
            p99_ms=quantile(latencies, 0.99) * 1e3,
            payload_bytes=measured["payload_bytes"],
            cpu_us={role: (after[role] - before[role]) / expected * 1e6 for role in _ROLES},
            redis_us=dict(sorted(redis_us.items(), key=lambda item: -item[1])[:8]),
            balanced=not measured["discrepancies"] and measured["used"] * self._plan.group == measured["claimed"],
            latencies_ms=[value * 1e3 for value in latencies] if self._plan.rate else [],
        )


def quantile(ordered: list[float], share: float) -> float:
    """The value below which `share` of an ascending list lies; 0 without values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _receive(conn: Connection, timeout_s: float = _READY_S) -> Any:
    if not conn.poll(timeout_s):
        raise MeasurementError(f"a process said nothing for {timeout_s:.0f} s")
    try:
        return conn.recv()
    except EOFError as error:
        raise MeasurementError("a process ended early", hint="its traceback is on the terminal") from error


def _wait_ready(path: Path, process: SpawnProcess) -> str:
    deadline = time.monotonic() + _READY_S
    while not path.exists():
        if not process.is_alive() or time.monotonic() > deadline:
            raise MeasurementError("the buffer service did not start", hint="its log is on the terminal")
        time.sleep(0.02)
    return str(json.loads(path.read_text(encoding="utf-8"))["address"])


@contextmanager
def started(plan: Plan, folder: Path, profile: Path | None = None) -> Iterator[Mesh]:
    """A mesh for a plan, ended afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    with Mesh(plan, folder, profile) as mesh:
        yield mesh
