"""The mesh under test: the product's own commands, each in a process of its own, and a link on every edge.

Links lead from generators, reward services and the learner to the fronts, and from the fronts to Redis. Generators also
have links to the learner (weights) and to the reward services. All are told the links' addresses and never one
another's own.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import redis
import yaml

from examples.demo.prepare import prepare
from rollmesh.buffer.redis_backend.embedded import find_redis_server
from rollmesh.mesh.runtime.threads import thread_environment
from tests.faults.processes import FaultError, Launch, Supervisor
from tests.faults.proxy import Conditions, Link, ProxyLoop
from tests.faults.redis_disk import Durability, RedisDisk
from tests.faults.reward import FREEZE_VARIABLE
from tests.repository import REPOSITORY

# Below the range from which the kernel takes ports for outgoing connections.
_PORTS = range(12_000, 30_000)
FRONTS = ("front-0", "front-1")
FRONT = "front"
REWARDS = ("reward-0", "reward-1")
GENERATORS = ("generator-0", "generator-1")
LEARNER = "learner"
REDIS = "redis"
# Scores for the slow generator come back so much later, twice.
SLOW = Conditions(delay_s=0.6)
START_S = 300.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes and terms of the mesh.

    Attributes:
        lease_s: term of every lease.
        staleness: the bound.
        max_reuse: steps that may use a group.
        order: which ready groups train first.
        durability: of Redis.
        slow: one generator is slow, so that the learner holds a part of a batch most of the time.
        evaluation: rounds of evaluation run during the training.
        groups, n: groups per batch, members per group.
        steps: batches after which the run ends; more than will be trained.
        turns: learner and generators take turns on the same devices.
        step_s: deadline of each step of a swap.
    """

    lease_s: float = 4.0
    staleness: int = 2
    max_reuse: int = 1
    order: str = "in_order"
    durability: Durability = "always"
    slow: bool = False
    evaluation: bool = False
    groups: int = 8
    n: int = 4
    steps: int = 1_000_000
    turns: bool = False
    step_s: float = 6.0

    def document(self, data: Path, folder: Path) -> dict[str, Any]:
        """The configuration, as YAML has it."""
        return {
            "run": {"name": "run", "dir": str(folder)},
            "model": {"path": str(data / "model")},
            "data": {"train": str(data / "train.parquet")} | self._held_out(data),
            "eval": {"every_steps": 10, "rows": 8, "timeout_s": 15.0} if self.evaluation else {},
            "algorithm": {"name": "grpo", "correction": {"mode": "behaviour"}},
            "rollout": {
                "device": "cpu",
                "replicas": len(GENERATORS),
                "n": self.n,
                "max_prompt_tokens": 16,
                "max_response_tokens": 6,
                "slots": 32,
                "reward_wait_s": 12.0,
                "draft_every_s": 0.5,
                "draft_every_tokens": 2,
            },
            "reward": {
                "functions": [f"{REPOSITORY / 'tests' / 'faults' / 'reward.py'}:compute_score"],
                "timeout_s": 4.0,
                "scorer_timeout_s": 3.0,
            },
            "learner": {
                "device": "cpu",
                "steps": self.steps,
                "batch": {"groups": self.groups},
                "optimizer": {"lr": 1e-4},
            },
            "buffer": {
                "max_staleness": self.staleness,
                "max_reuse": self.max_reuse,
                "order": self.order,
                "lease_s": self.lease_s,
                "reconnect_grace_s": 0.5,
            },
            # Over the wire, and not through shared memory: the link is to be cut.
            "weights": {"transport": "grpc", "timeout_s": 10.0},
            "checkpoint": {"every_s": 3.0},
            "placement": {"mode": "collocated", "step_timeout_s": self.step_s} if self.turns else {},
            "logging": {"samples_per_step": 0},
            "network": {"metrics": False, "rpc_timeout_s": 4.0},
        }

    def _held_out(self, data: Path) -> dict[str, str]:
        return {"eval": str(data / "eval.parquet")} if self.evaluation else {}

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def prepare_data(folder: Path) -> Path:
    """The demonstration's data and a tiny model with a short warm start."""
    prepare(folder, task="arithmetic", seed=0, largest_digit=4, held_out=16, warm_steps=20)
    return folder


def free_port() -> int:
    """A port without a listener, which the kernel gives to no process by itself."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


class World:
    """Everything that is started, and the links between.

    Args:
        folder: for configuration, logs, Redis and the run.
        data: as `prepare_data` makes it.
        settings: of the run.
    """

    def __init__(self, folder: Path, data: Path, settings: Settings) -> None:
        self.settings = settings
        self.folder = folder
        self.run = folder / "run"
        self.ranks = 1
        self._ready = folder / "ready"
        self._ready.mkdir(parents=True, exist_ok=True)
        self._config = folder / "config.yaml"
        self._config.write_text(yaml.safe_dump(settings.document(data, folder), sort_keys=False))
        self._exit = ExitStack()
        self._proxies = ProxyLoop()
        self._exit.callback(self._proxies.close)
        self.disk = RedisDisk(folder / "redis-data", settings.durability)
        self.supervisor = Supervisor(folder)
        self._ports = {name: free_port() for name in (*FRONTS, *REWARDS, REDIS)}
        self.links: dict[str, list[Link]] = {}
        """Service -> its links: one per start of the learner, whose address changes with it."""

    @property
    def redis_url(self) -> str:
        """Redis without a link between, for the audit."""
        return f"redis://127.0.0.1:{self._ports[REDIS]}/0"

    @property
    def fronts(self) -> list[str]:
        """Addresses of the fronts without links between, for the audit."""
        return [f"127.0.0.1:{self._ports[name]}" for name in FRONTS]

    def redis(self) -> redis.Redis:
        return redis.Redis.from_url(self.redis_url, socket_timeout=10.0)

    def start(self) -> None:
        """Starts all services; returns when they answer.

        Raises:
            FaultError: one did not.
        """
        self.supervisor.add(REDIS, self._redis)
        self.wait_redis(START_S)
        for name in FRONTS:
            self.supervisor.add(name, partial(self._front, name))
        for name in FRONTS:
            self.supervisor.wait_ready(name, START_S)
        for name in REWARDS:
            self.supervisor.add(name, partial(self._reward, name))
            if self.settings.slow:
                self.links[name][0].usually(GENERATORS[1], SLOW)
        self.supervisor.add(LEARNER, self._learner)
        for name in GENERATORS:
            self.supervisor.add(name, partial(self._generator, name))
        for name in (*REWARDS, LEARNER, *GENERATORS):
            self.supervisor.wait_ready(name, START_S)

    def close(self) -> None:
        """Ends everything, whatever state it is in."""
        self.supervisor.close()
        for link in (link for links in self.links.values() for link in links):
            link.close()
        self._exit.close()

    def apply(self, client: str, service: str, conditions: Conditions) -> None:
        """Changes the link between a client (a process, a service, or `*`) and a service (`front`: all fronts)."""
        for name in FRONTS if service == FRONT else (service,):
            for link in self.links[name]:
                link.apply(client, conditions)

    def wait_redis(self, deadline_s: float) -> None:
        """Waits until Redis has loaded its data.

        Raises:
            FaultError: the deadline passed.
        """
        until = time.monotonic() + deadline_s
        with self.redis() as client:
            while time.monotonic() < until:
                try:
                    client.ping()
                    return
                except (redis.exceptions.BusyLoadingError, redis.exceptions.ConnectionError):
                    time.sleep(0.05)
        raise FaultError(f"Redis was not ready within {deadline_s} s")

    # ------------------------------------------------------------------------------------------------- launches

    def _redis(self, _index: int) -> Launch:
        self.disk.before_start()
        settings = {"bind": "127.0.0.1", "port": str(self._ports[REDIS]), "maxmemory-policy": "noeviction"}
        options = [part for key, value in settings.items() for part in (f"--{key}", value)]
        return Launch([find_redis_server(), *options, *self.disk.options()], {})

    def _front(self, name: str, index: int) -> Launch:
        overrides = {
            "buffer.redis": f"redis://{self._link(REDIS).address}/0",
            "network.advertise": self._link(name).address,
            "logging.level": "debug",
        }
        return self._launch(name, index, ("buffer",), self._ports[name], overrides)

    def _reward(self, name: str, index: int) -> Launch:
        overrides = {"network.advertise": self._link(name).address}
        launch = self._launch(name, index, ("reward", "serve"), self._ports[name], overrides, self._mesh())
        environment = {**launch.environment, FREEZE_VARIABLE: str(self.freeze_file(name))}
        return replace(launch, environment=environment)

    def freeze_file(self, reward: str) -> Path:
        """The file that tells a reward service to hold its interpreter (`tests.faults.reward`)."""
        return self._ready / f"{reward}.freeze"

    def _learner(self, index: int) -> Launch:
        # Its own port each time: one that was only stopped still holds the last.
        port = free_port()
        links = self.links.setdefault(LEARNER, [])
        links.append(self._proxies.link(port, self.supervisor.owner))
        overrides = {"network.advertise": links[-1].address, "learner.ranks": str(self.ranks)}
        return self._launch(LEARNER, index, ("learner",), port, overrides, self._mesh())

    def _generator(self, name: str, index: int) -> Launch:
        ready = self._ready / f"{name}-{index}.json"
        command = [
            *("generator", *self._mesh(), "--threads", "1"),
            *("--member-id", f"{name}-{index}", "--ready-file", str(ready)),
        ]
        return Launch(command, self._environment(), ready, forked=True)

    def _launch(
        self,
        name: str,
        index: int,
        command: Sequence[str],
        port: int,
        overrides: Mapping[str, str],
        more: Sequence[str] = (),
    ) -> Launch:
        ready = self._ready / f"{name}-{index}.json"
        line = [
            *(*command, str(self._config), "--port", str(port), "--ready-file", str(ready), *more),
            *(f"--{key}={value}" for key, value in overrides.items()),
        ]
        return Launch(line, self._environment(), ready, forked=True)

    def _environment(self) -> dict[str, str]:
        return dict(thread_environment(1))

    def _mesh(self) -> tuple[str, str]:
        """The option that names the mesh: links to all fronts."""
        return "--mesh", ",".join(self._link(front).address for front in FRONTS)

    def _link(self, service: str) -> Link:
        """The link to a service that keeps its port; made when it is first asked for."""
        if service not in self.links:
            self.links[service] = [self._proxies.link(self._ports[service], self.supervisor.owner)]
        return self.links[service][0]
