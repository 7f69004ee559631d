"""Brings the mesh up as containers, trains, kills each container once, recounts, and takes everything down again.

It needs Docker with Compose on this machine. It needs root too, to kill the process of a container: Docker takes
`docker kill` for a stop, and starts nothing again. The project is one of its own (`rollmesh-try`), with volumes of its
own. Settings are those of `.env` and of the environment. It prints its log.

Each wait has a deadline, and any that passes ends the script with status 1 and the log of the containers.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).resolve().parent
PROJECT = "rollmesh-try"
# Longer than the trial: it ends the run itself. Checkpoints are frequent, for the learner is killed as well.
OPTIONS = "--learner.steps=100000 --eval.stop_at=null --checkpoint.every_s=10"
METRICS = "/data/runs/demo/metrics.jsonl"
# Containers in the order of their deaths; one of each service.
VICTIMS = ("generator", "reward", "redis", "buffer", "learner", "prometheus", "dashboard", "grafana")
# Steps that have to follow a death.
PROGRESS = 10
# The buffer's words for a Redis that has returned without its last writes.
_LOST = "Redis went back from revision"
# Seconds for a container to come back, and for the training to continue.
DEADLINE_S = 600.0


class TrialError(Exception):
    """A container or a step did not come in time, or a count is wrong."""


@dataclass(frozen=True)
class Container:
    """One container, as Docker describes it."""

    id: str
    service: str
    pid: int
    restarts: int
    # `healthy`, `starting`, `unhealthy`; empty without a check.
    health: str

    @property
    def serves(self) -> bool:
        return self.pid > 0 and self.health in ("", "healthy")


class Compose:
    """The commands of one project.

    Args:
        settings: variables of `.env` that have other values here.
    """

    def __init__(self, settings: dict[str, str]) -> None:
        self._environment = os.environ | {"DOCKER_BUILDKIT": "1", "COMPOSE_PROJECT_NAME": PROJECT} | settings
        plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
        self._command = ["docker", "compose"] if plugin.returncode == 0 else ["docker-compose"]

    def __call__(self, *arguments: str, check: bool = True) -> str:
        """Runs `docker compose` and returns what it wrote."""
        done = subprocess.run(
            [*self._command, *arguments], cwd=DEPLOY, env=self._environment, capture_output=True, text=True, check=False
        )
        if check and done.returncode:
            raise TrialError(f"compose {' '.join(arguments)}: status {done.returncode}\n{done.stderr[-4000:]}")
        return done.stdout


def docker(*arguments: str, check: bool = True) -> str:
    """Runs `docker` and returns what it wrote."""
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=check).stdout


def containers() -> list[Container]:
    """All containers of the project, running or not."""
    ids = docker("ps", "--all", "--quiet", f"--filter=label=com.docker.compose.project={PROJECT}").split()
    return [_container(item) for item in json.loads(docker("inspect", *ids))] if ids else []


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="store_true", help="build the images first")
    parser.add_argument("--without", action="append", default=[], metavar="SERVICE", help="leave a service out")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--starts", type=int, default=1, help="bring it up this many times, for the time that it takes")
    parser.add_argument(
        "--learns", type=float, metavar="REWARD", help="wait for this held-out reward before anything dies"
    )
    options = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("docker") is None:
        parser.error("needs Docker, and root on its machine")
    compose = Compose({"ROLLMESH_OPTIONS": OPTIONS, "ROLLMESH_TLS": "on" if options.tls else "off"})
    try:
        Trial(compose, options.without).run(build=options.build, starts=options.starts, learns=options.learns)
    except TrialError as error:
        print(compose("logs", "--tail=40", "--no-color", check=False))
        raise SystemExit(f"FAILED: {error}") from error
    finally:
        compose("down", "--volumes", "--timeout=60", check=False)


class Trial:
    """One trial, step by step.

    Args:
        without: services that are left out.
    """

    def __init__(self, compose: Compose, without: Sequence[str]) -> None:
        self._compose = compose
        self._without = without
        self._began = time.monotonic()

    def run(self, *, build: bool, starts: int, learns: float | None) -> None:
        """All of it.

        Args:
            build: build the images first.
            starts: how often everything is brought up; each start has new volumes.
            learns: held-out reward that comes before anything is killed; None: any.

        Raises:
            TrialError: something failed, or did not come in time.
        """
        services = [item for item in self._compose("config", "--services").split() if item not in self._without]
        if containers():
            raise TrialError(f"project {PROJECT} has containers already")
        if build:
            began = time.monotonic()
            # One service for each image.
            self._compose("build", "setup", "learner", "generator")
            self._say(f"images built in {time.monotonic() - began:.0f} s")
        self._start(services)
        for _ in range(starts - 1):
            self._compose("down", "--volumes", "--timeout=60")
            self._start(services)
        if learns is not None:
            self._until(f"held-out reward {learns}", lambda: (self._held_out() or 0.0) >= learns)
            self._say(f"held-out reward {self._held_out():.3f} at step {self._step()}")
        for name in VICTIMS:
            if name in services:
                self._kill(name)
        self._scale(services, generators=4)
        self._end()

    def _start(self, services: Sequence[str]) -> None:
        began = time.monotonic()
        self._compose("up", "--detach", "--no-build", *services)
        up = time.monotonic() - began
        self._until("the first step", lambda: self._step() > 0, every_s=0.2)
        first = time.monotonic() - began
        self._say(f"up: {', '.join(services)}")
        self._say(
            f"`up --detach` took {up:.0f} s, the first trained step came after {first:.0f} s "
            f"(load {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores)"
        )
        self._until("health of all", lambda: all(item.serves for item in self._serving()))
        self._say(f"all healthy after {time.monotonic() - began:.0f} s; step {self._step()}")

    def _kill(self, service: str) -> None:
        """Kills the first container of a service; it has to come back by itself, and the training to continue."""
        victim = next(item for item in self._serving() if item.service == service)
        step, began = self._step(), time.monotonic()
        os.kill(victim.pid, signal.SIGKILL)

        def returned() -> bool:
            [now] = [item for item in containers() if item.id == victim.id]
            return now.restarts > victim.restarts and now.serves and now.pid != victim.pid

        self._until(f"the return of {service}", returned)
        back = time.monotonic() - began
        self._until(f"steps after the death of {service}", lambda: self._step() >= step + PROGRESS)
        if _LOST in self._compose("logs", "--no-color", "buffer"):
            raise TrialError("Redis lost what it had acknowledged")
        self._say(
            f"kill -9 {service}: healthy again after {back:.0f} s; step {step} -> {self._step()}; "
            f"ledger {self._recount()}"
        )

    def _scale(self, services: Sequence[str], generators: int) -> None:
        self._compose("up", "--detach", "--no-build", "--no-recreate", f"--scale=generator={generators}", *services)

        def all_there() -> bool:
            found = [item for item in self._serving() if item.service == "generator"]
            return len(found) == generators and all(item.serves for item in found)

        self._until(f"{generators} generators", all_there)
        step = self._step()
        self._until("steps with more generators", lambda: self._step() >= step + PROGRESS)
        self._say(f"--scale generator={generators}: all healthy, step {self._step()}; ledger {self._recount()}")

    def _end(self) -> None:
        reward = self._held_out()
        began = time.monotonic()
        self._compose("stop", "learner")
        self._say(
            f"learner stopped within {time.monotonic() - began:.0f} s, its last held-out reward was {reward}; "
            f"ledger {self._recount()}"
        )
        self._compose("down", "--volumes")
        if left := containers():
            raise TrialError(f"left after `down`: {left}")
        self._say("down, nothing is left")

    def _serving(self) -> list[Container]:
        return [item for item in containers() if item.service not in ("setup", "prepare")]

    def _records(self, lines: int) -> list[dict[str, Any]]:
        found = [item.id for item in containers() if item.service == "learner"]
        text = docker("exec", found[0], "tail", "-n", str(lines), METRICS, check=False) if found else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def _step(self) -> int:
        """The last step in the metrics; 0: none yet, or the learner is away."""
        return max((int(item.get("step", 0)) for item in self._records(3)), default=0)

    def _held_out(self) -> float | None:
        found = [item["eval/reward"] for item in self._records(400) if "eval/reward" in item]
        return found[-1] if found else None

    def _recount(self) -> str:
        """The verdict of `rollmesh ledger`, with counts of the training's groups."""
        told: dict[str, Any] = json.loads(self._compose("exec", "-T", "buffer", "mesh", "ledger", "--json"))
        if not told["balances"]:
            raise TrialError(f"the ledger does not balance: {told}")
        counters = told["tables"]["train"]
        return f"balances ({counters['admitted']} groups admitted, {counters['trained']} trained)"

    def _until(self, what: str, holds: Callable[[], bool], every_s: float = 1.0) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            if time.monotonic() > deadline:
                raise TrialError(f"{what}: not within {DEADLINE_S:.0f} s")
            time.sleep(every_s)

    def _say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f} s  {text}", flush=True)


def _container(told: dict[str, Any]) -> Container:
    state = told["State"]
    return Container(
        id=told["Id"],
        service=told["Config"]["Labels"]["com.docker.compose.service"],
        pid=state["Pid"] if state["Running"] else 0,
        restarts=told["RestartCount"],
        health=state.get("Health", {}).get("Status", ""),
    )


if __name__ == "__main__":
    main()
