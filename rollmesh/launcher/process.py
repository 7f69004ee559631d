"""One service process: started, watched until it is healthy, stopped, its log and its exit explained.

Invariants: the process leads a session of its own, so a Ctrl-C in the terminal reaches the launcher alone and the
whole process tree can be ended at once; it dies with the launcher (`mesh.supervised`); its output is appended to one
log file; once it has exited, nothing of its process group remains.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh.config.models import SecuritySection
from mesh.errors import UnreachableError
from mesh.rpc import open_channel
from mesh.supervised import wrapped
from rollmesh.launcher import exit_status
from rollmesh.launcher.errors import ServiceExitError
from rollmesh.launcher.logs import explain_exit, tail

_HEALTH_DEADLINE_S = 10.0
# The ready file has no event a parent could wait for; this is how often it is looked for.
_READY_POLL_S = 0.05


@dataclass(frozen=True)
class ServiceSpec:
    """What to start and how to treat it.

    Attributes:
        name: unique in the run; names log and ready file.
        command: builds the argument list, given whether this is a restart and the address the service had before.
        environment: added to the launcher's own.
        start_deadline_s: seconds within which it must be healthy.
        drain_s: seconds it gets to end in order after SIGTERM.
        completes_run: a clean exit of this service ends the run (the learner).
    """

    name: str
    command: Callable[[bool, str | None], Sequence[str]]
    environment: Mapping[str, str]
    start_deadline_s: float = 180.0
    drain_s: float = 15.0
    completes_run: bool = False


class ServiceProcess:
    """A running (or ended) process of a service."""

    def __init__(self, spec: ServiceSpec, process: asyncio.subprocess.Process, folder: Path) -> None:
        self.spec = spec
        self.address: str | None = None
        self._process = process
        self._folder = folder

    @classmethod
    async def start(cls, spec: ServiceSpec, folder: Path, *, restart: bool, address: str | None) -> ServiceProcess:
        """Starts the service.

        Args:
            folder: the run folder; logs go to `logs/NAME.log`, the ready file to `services/NAME.json`.
            restart: whether the service ran before in this run.
            address: where it answered then.
        """
        log_path, ready = log_file(folder, spec.name), ready_file(folder, spec.name)
        for path in (log_path, ready):
            path.parent.mkdir(parents=True, exist_ok=True)
        ready.unlink(missing_ok=True)
        exit_file(folder, spec.name).unlink(missing_ok=True)
        environment = {
            **os.environ,
            **spec.environment,
            exit_status.VARIABLE: str(exit_file(folder, spec.name).absolute()),
        }
        with log_path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *wrapped(spec.command(restart, address)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        return cls(spec, process, folder)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def wait_ready(self, security: SecuritySection) -> str:
        """Waits for the ready file and for gRPC health; returns the service's address.

        Raises:
            ServiceExitError: the process ended first.
            UnreachableError: not healthy within the deadline.
        """
        path = ready_file(self._folder, self.spec.name)
        deadline = asyncio.get_running_loop().time() + self.spec.start_deadline_s
        while not path.exists():
            if not self.running:
                raise self.failure()
            if asyncio.get_running_loop().time() > deadline:
                raise UnreachableError(
                    f"{self.spec.name} was not ready within {self.spec.start_deadline_s:.0f} s",
                    hint=f"see {log_file(self._folder, self.spec.name)}",
                )
            await asyncio.sleep(_READY_POLL_S)
        address = str(json.loads(path.read_text(encoding="utf-8"))["address"])
        await check_health(address, security)
        self.address = address
        return address

    async def wait(self) -> int:
        """Waits for the end and returns the exit status; what is left of the process group is killed."""
        await self._process.wait()
        self._kill_group()
        return self.status

    @property
    def status(self) -> int:
        """Exit status of the ended process; the service's own where a wrapper (torchrun) has replaced it."""
        left = exit_status.find(exit_file(self._folder, self.spec.name))
        if left is not None:
            return left
        return self._process.returncode if self._process.returncode is not None else -1

    def failure(self) -> ServiceExitError:
        """The typed error for an unexpected end."""
        path = log_file(self._folder, self.spec.name)
        lines = tail(path)
        message, hint = explain_exit(self.status, lines)
        return ServiceExitError(self.spec.name, self.status, message, lines, hint=hint or f"see {path}")

    def terminate(self) -> None:
        """Asks the service to end in order."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """Ends the whole process group at once."""
        self._kill_group()

    async def stop(self) -> None:
        """Ends the service in order, by force once its drain time is over."""
        self.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), self.spec.drain_s)
        except TimeoutError:
            self.kill()
            await self._process.wait()
        self._kill_group()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


async def check_health(address: str, security: SecuritySection) -> None:
    """Asks the standard health service.

    Raises:
        UnreachableError: no answer within the deadline, or not serving.
    """
    async with open_channel(address, security) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer: health_pb2.HealthCheckResponse = await stub.Check(
                health_pb2.HealthCheckRequest(), timeout=_HEALTH_DEADLINE_S, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            raise UnreachableError(f"{address} does not answer the health check: {error.details()}") from error
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise UnreachableError(f"{address} is up but not serving")


def log_file(folder: Path, service: str) -> Path:
    return folder / "logs" / f"{service}.log"


def ready_file(folder: Path, service: str) -> Path:
    return folder / "services" / f"{service}.json"


def exit_file(folder: Path, service: str) -> Path:
    return folder / "services" / f"{service}.exit"
