"""A mesh over hosts with addresses of their own: two fronts, a reward service, a learner, and generators.

Each service runs by its plain command in the network namespace of its host, with TLS. The nodes know a join string and
nothing else. The hosts share a disk, as nodes of a cluster do.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.netns import star
from rollmesh.launcher.mesh_client import MeshClient
from rollmesh.mesh.access.certificates import OWN_HOST, CertificateAuthority, fingerprint_of
from rollmesh.mesh.access.join_string import JoinString
from rollmesh.mesh.access.role_grants import MeshKey
from rollmesh.mesh.access.roles import Role
from rollmesh.mesh.addresses import join_address
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.runtime.threads import thread_environment
from rollmesh.mesh.tables import TRAIN
from rollmesh.protos import buffer_pb2, membership_pb2
from tests.faults.processes import FaultError, Launch, Process, Supervisor
from tests.repository import REPOSITORY
from tests.secrets_here import TOKEN, write_secret

FRONTS = ("front-0", "front-1")
REWARD = "reward"
LEARNER = "learner"
GENERATORS = ("generator-0", "generator-1", "generator-2")
HOSTS = (*FRONTS, REWARD, LEARNER, *GENERATORS)
# Free numbers of the network: hosts that change their address get them.
NEW_NUMBER = {FRONTS[0]: 101, LEARNER: 104}
PORT = 7400
NAME = "mesh.test"
LEASE_S = 5.0
START_S = 300.0
# For what hangs: a busy machine is slow.
_DEADLINE_S = 300.0
_POLL_S = 0.1
# Loaded into a process; its monotonic clock stays as it is.
_FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"


def faketime_library() -> Path | None:
    """The library that gives a process another clock; None where it is not installed."""
    return path if (path := Path(_FAKETIME)).exists() else None


@dataclass(frozen=True)
class NodeSettings:
    """Settings of one service.

    Attributes:
        clock_s: seconds by which its clock is ahead: that of the process where it is executed, else that of Python.
        mesh: addresses in its join string; empty: the first front's.
        ipv6: it advertises its IPv6 address.
        executed: it is a program of its own, and not forked from one that has loaded everything.
    """

    clock_s: int = 0
    mesh: str = ""
    ipv6: bool = False
    executed: bool = False


class NodeMesh:
    """Everything that is started.

    Args:
        folder: for configuration, secrets, logs, Redis and the run.
        data: as `tests.demo_data.prepared` makes it.
        settings: of services that are not the default.
        changes: of the configuration.

    Attributes:
        events: what has happened, one line each: seconds since the start, steps trained, and the event.
        hosts: by service.
        supervisor: of the services.
    """

    def __init__(
        self,
        folder: Path,
        data: Path,
        settings: Mapping[str, NodeSettings] | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.run = folder / "run"
        self._settings = settings or {}
        self._began = time.monotonic()
        self.events: list[str] = []
        self._exit = ExitStack()
        self.hosts = dict(zip(HOSTS, self._exit.enter_context(star(None, len(HOSTS), here=True)), strict=True))
        self._authority = CertificateAuthority.new()
        for name, content in {
            "token": TOKEN.encode(),
            "buffer.grant": MeshKey(TOKEN).grant_file(Role.BUFFER).encode(),
            "authority.pem": self._authority.pem,
        }.items():
            write_secret(folder / name, content.decode())
        self._config = folder / "config.yaml"
        self._config.write_text(yaml.safe_dump({**_document(folder, data), **(changes or {})}))
        self.supervisor = Supervisor(folder)
        self._exit.callback(self.supervisor.close)
        self._bridge = asyncio.Runner()
        self._exit.callback(self._bridge.close)
        self._clients: dict[str, MeshClient] = {}
        self._exit.callback(lambda: self._bridge.run(self._close_clients()))

    def close(self) -> None:
        """Ends everything, whatever state it is in."""
        self._exit.close()

    @property
    def security(self) -> SecuritySection:
        """Token and TLS of the operator."""
        return SecuritySection(token_file=self.folder / "token", tls_ca=self.folder / "authority.pem")

    def address_of(self, front: str) -> str:
        return join_address(self.hosts[front].address, PORT)

    # ---------------------------------------------------------------------------------------------------- services

    def start(self, *names: str) -> None:
        """Starts services, all at once; returns when they answer.

        Raises:
            FaultError: one did not.
        """
        for name in names:
            self.supervisor.add(name, partial(self._launch, name))
        for name in names:
            self.supervisor.wait_ready(name, START_S)
        self.note(f"{', '.join(names)} started by command")

    def note(self, event: str) -> None:
        """Adds an event to `events`."""
        self.events.append(f"{time.monotonic() - self._began:5.0f} s  step {self.steps():3}  {event}")

    def kill(self, name: str) -> Process:
        """Kills a service (`kill -9`), and waits until another process of it answers."""
        self.supervisor.kill9(name)
        self.supervisor.wait_ready(name, START_S)
        process = self.supervisor.current(name)
        assert process is not None, name
        self.note(f"{name} killed (kill -9), and its successor answers")
        return process

    def join_file(self, name: str, role: Role) -> Path:
        """The join string of a node, in a file: certificate and all."""
        host, said = self.hosts[name], self._settings.get(name, NodeSettings())
        reached = host.address6 if said.ipv6 else host.address
        join = JoinString(
            mesh=said.mesh or self.address_of(FRONTS[0]),
            grant=MeshKey(TOKEN).grant_file(role, name),
            authority=fingerprint_of(self._authority.pem, "authority"),
            host=reached,
            certificate=self._authority.issue(name, (host.address, host.address6, *OWN_HOST)),
        )
        return write_secret(self.folder / f"{name}.join", join.pack())

    def name_fronts(self, service: str, *addresses: str) -> None:
        """Lets `NAME` stand for these addresses on a service's host, as DNS would."""
        folder = Path("/etc/netns", self.hosts[service].namespace)
        if not folder.exists():
            folder.mkdir(parents=True)
            self._exit.callback(folder.rmdir)
            self._exit.callback((folder / "hosts").unlink)
        lines = ["127.0.0.1 localhost\n", *(f"{address} {NAME}\n" for address in addresses)]
        # In place: the file is mounted where the service runs.
        (folder / "hosts").write_text("".join(lines))

    def _launch(self, name: str, index: int) -> Launch:
        ready = self.folder / f"{name}-{index}.json"
        if name in FRONTS:
            command = ["buffer", str(self._config), *self._of_front(name)]
        elif name == REWARD:
            command = ["reward", "serve", str(self._config), "--join", str(self.join_file(name, Role.REWARD))]
        elif name == LEARNER:
            command = ["learner", str(self._config), "--join", str(self.join_file(name, Role.LEARNER)), "--takeover"]
        else:
            command = ["generator", "--join", str(self.join_file(name, Role.GENERATOR)), "--threads", "1"]
        command += ["--ready-file", str(ready)]
        host, said = self.hosts[name], self._settings.get(name, NodeSettings())
        environment = thread_environment(1) | {"PYTHONPATH": str(REPOSITORY)}
        if not said.executed:
            return Launch(command, environment, ready, forked=True, namespace=host.namespace, clock_s=said.clock_s)
        if said.clock_s:
            environment |= {
                "LD_PRELOAD": _FAKETIME,
                "FAKETIME": f"{said.clock_s:+d}",
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            }
        line = host.command("env", *(f"{key}={value}" for key, value in environment.items()))
        return Launch([*line, sys.executable, "-m", "rollmesh.cli", *command], {}, ready)

    def _of_front(self, name: str) -> list[str]:
        host = self.hosts[name]
        issued = self._authority.issue(name, (host.address, host.address6, NAME, *OWN_HOST))
        files = {"tls_cert": issued.pem(self._authority.pem).decode(), "tls_key": issued.key_pem.decode()}
        paths = {key: write_secret(self.folder / f"{name}.{key}", content) for key, content in files.items()}
        settings = {
            "network.host": "0.0.0.0",
            "network.port": PORT,
            "network.advertise": host.address,
            "security.token_file": self.folder / "buffer.grant",
            "security.tls_ca": self.folder / "authority.pem",
            **{f"security.{key}": path for key, path in paths.items()},
        }
        if name != FRONTS[0]:
            settings["buffer.redis"] = (self.run / "redis" / "url").read_text()
        return [f"--{key}={value}" for key, value in settings.items()]

    # ------------------------------------------------------------------------------------------------ observation

    def ledger(self) -> buffer_pb2.LedgerResponse:
        """Every group of the train table, recounted.

        Raises:
            RollmeshError: no front answers.
        """
        return self._bridge.run(self._client().ledger(TRAIN))

    def members(self, role: membership_pb2.Role) -> list[membership_pb2.Member]:
        """Members of a role.

        Raises:
            RollmeshError: no front answers.
        """
        listed = self._bridge.run(self._client().members())
        return [member for member in listed.members if member.role == role]

    def steps(self) -> int:
        """Steps trained so far, over all learners."""
        path = self.run / "metrics.jsonl"
        records = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
        return max((record["step"] for record in records if "step" in record), default=0)

    def stored_tokens(self, service: str) -> float:
        """Tokens of finished responses that the generators of a service have stored, as their heartbeats say."""
        found = [m for m in self.members(membership_pb2.ROLE_GENERATOR) if f"-{service}." in m.member_id]
        return sum(member.gauges.get("members_scored", 0.0) for member in found)

    def wait_for_steps(self, more: int, deadline_s: float = _DEADLINE_S) -> int:
        """Waits until so many further steps are trained; returns the number of the last.

        Raises:
            FaultError: they are not in time.
        """
        wanted = self.steps() + more
        self.wait_until(lambda: self.steps() >= wanted, f"{more} further steps", deadline_s)
        return self.steps()

    def wait_until(self, condition: Any, what: str, deadline_s: float = _DEADLINE_S) -> float:
        """Waits for a state of the mesh; returns the seconds that it took.

        Raises:
            FaultError: it does not come in time.
        """
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > deadline_s:
                last = "\n".join(f"{p.name}:\n{p.tail()}" for p in self.supervisor.processes)
                raise FaultError(f"no {what} within {deadline_s:.0f} s, {self.steps()} steps so far\n{last}")
            time.sleep(_POLL_S)  # neither files nor members have an event here
        self.note(what)
        return time.monotonic() - began

    def _client(self) -> MeshClient:
        """A client of the fronts at their present addresses."""
        mesh = ",".join(map(self.address_of, FRONTS))
        if mesh not in self._clients:
            self._clients[mesh] = self._bridge.run(self._opened(mesh))
        return self._clients[mesh]

    async def _opened(self, mesh: str) -> MeshClient:
        return MeshClient(mesh, self.security)

    async def _close_clients(self) -> None:
        for client in self._clients.values():
            await client.__aexit__()


def _document(folder: Path, data: Path) -> dict[str, Any]:
    return {
        "run": {"name": "run", "dir": str(folder)},
        "model": {"path": str(data / "model")},
        "data": {"train": str(data / "train.parquet")},
        "algorithm": {"name": "grpo", "correction": {"mode": "behaviour"}},
        "rollout": {"device": "cpu", "n": 2, "max_prompt_tokens": 16, "max_response_tokens": 6, "slots": 4},
        "reward": {"functions": [f"{REPOSITORY / 'tests' / 'nodes' / 'reward.py'}:compute_score"]},
        "learner": {"device": "cpu", "steps": 1_000_000, "batch": {"groups": 2}},
        "buffer": {"lease_s": LEASE_S, "reconnect_grace_s": 0.5},
        "weights": {"transport": "grpc", "timeout_s": 30.0},
        "checkpoint": {"every_s": 5.0},
        "logging": {"samples_per_step": 0},
        "network": {"metrics": False},
    }
