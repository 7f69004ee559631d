"""One service process: started, watched until it is healthy, stopped, its log and its exit explained.

Invariants: the process leads a session of its own, so that a Ctrl-C in the terminal reaches the launcher alone. The
whole process tree can be ended at once. It dies with the launcher, executed or forked (`mesh.runtime.die_with_parent`).
Its output is appended to one log file. Once it has exited, nothing of its process group remains. Its children in groups
of their own are never left stopped, so that they get the signal that their parent's death sends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import psutil

from rollmesh.launcher.errors import FrozenServiceError, ServiceExitError
from rollmesh.launcher.final_work import DrainClock, FinalWork
from rollmesh.launcher.health import HealthProbe
from rollmesh.launcher.loading import REPORT_EVERY_S, Loading, loading_bounds, report_loading
from rollmesh.launcher.logs import explain_exit, tail
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.variables import without_settings
from rollmesh.mesh.errors import UnreachableError
from rollmesh.mesh.liveness.freeze_detector import Bounds, Frozen
from rollmesh.mesh.liveness.process_ends import descendants
from rollmesh.mesh.liveness.process_state import read_child_process
from rollmesh.mesh.liveness.watchdog import wait_until_frozen
from rollmesh.mesh.runtime.child_processes import Child, start_process
from rollmesh.mesh.runtime.die_with_parent import die_with_parent
from rollmesh.mesh.runtime.fork_server.client import ForkServer
from rollmesh.mesh.runtime.fork_server.forked import ForkedProcess

# A parent cannot wait for the ready file by an event; this is how often it is checked.
_READY_POLL_S = 0.05
# Seconds that a broken answer waits for the service's end.
_CAUSE_S = 5.0


@dataclass(frozen=True)
class ServiceSpec:
    """The specification of a service process.

    Attributes:
        name: unique in the run; names log and ready file.
        command: builds the argument list, given whether this is a restart.
        environment: added to the launcher's own.
        start_deadline_s: seconds within which it must be healthy; with `loading`, answer the health check.
        drain_s: seconds it gets to end in order after SIGTERM.
        final_work: it gets more for that; None: no more.
        completes_run: a clean exit of this service ends the run (the learner).
        parts: names of further processes of this service that answer the health check and write ready files of their
            own (further ranks of the learner).
        may_fork: it may be forked; False: it makes the environment of libraries before it loads them.
        loading: it answers before it loads, and may load for longer; None: it is ready with its first answer.
    """

    name: str
    command: Callable[[bool], Sequence[str]]
    environment: Mapping[str, str]
    start_deadline_s: float = 180.0
    drain_s: float = 15.0
    final_work: FinalWork | None = None
    completes_run: bool = False
    parts: tuple[str, ...] = ()
    may_fork: bool = True
    loading: Loading | None = None

    @property
    def answering(self) -> tuple[str, ...]:
        """Names of the ready files that its processes write with their first answer."""
        return (self.name if self.loading is None else self.loading.name, *self.parts)


@dataclass(frozen=True, slots=True)
class _Ready:
    """The contents of a ready file."""

    address: str
    pid: int


class ServiceProcess:
    """A running (or ended) process of a service."""

    def __init__(self, spec: ServiceSpec, process: Child, folder: Path, *, log_from: int) -> None:
        self.spec = spec
        # Bytes of the log before it was started.
        self._log_from = log_from
        self.address: str | None = None
        self._process = process
        self._folder = folder
        self._asked = False
        # The message once its time to end was over; else empty.
        self._overdue = ""

    @classmethod
    async def start(
        cls, spec: ServiceSpec, folder: Path, *, restart: bool, fork_server: ForkServer | None = None
    ) -> ServiceProcess:
        """Starts the service.

        Args:
            folder: the run folder; logs go to `logs/NAME.log`, the ready file to `services/NAME.json`.
            restart: whether the service ran before in this run.
            fork_server: forks it if that is possible; None: it is executed.
        """
        log_path = log_file(folder, spec.name)
        for path in (log_path, ready_file(folder, spec.name)):
            path.parent.mkdir(parents=True, exist_ok=True)
        for name in {spec.name, *spec.answering}:
            ready_file(folder, name).unlink(missing_ok=True)
        command = spec.command(restart)
        with log_path.open("ab") as log:
            log_from = log.seek(0, os.SEEK_END)
            process = await _start(
                command,
                {**without_settings(os.environ), **spec.environment},
                log,
                fork_server if spec.may_fork else None,
            )
        return cls(spec, process, folder, log_from=log_from)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.status is None

    async def wait_ready(
        self,
        security: SecuritySection,
        frozen_after_s: float = 0.0,
        report: Callable[[str], None] = lambda _text: None,
        *,
        report_every_s: float = REPORT_EVERY_S,
    ) -> str:
        """Waits for the ready files and for gRPC health; returns the service's address.

        Args:
            security: how to reach it.
            frozen_after_s: see `resources.frozen_after_s`.
            report: called every minute while it loads.
            report_every_s: other than a minute.

        Raises:
            ServiceExitError: the process ended first, or was frozen while it loaded.
            UnreachableError: not healthy within the deadline.
        """
        spec, now = self.spec, asyncio.get_running_loop().time
        deadline = now() + spec.start_deadline_s
        await self._until_written(spec.answering, spec.start_deadline_s, "see {log}")
        if spec.loading is not None:
            reporting = report_loading(spec.name, spec.loading.most_s, report, report_every_s)
            await self._until_loaded(spec.loading, security, frozen_after_s, asyncio.create_task(reporting))
            deadline = now() + spec.start_deadline_s
        address = self._ready(spec.name).address
        await self._until_serving(address, security, deadline - now())
        self.address = address
        return address

    async def _until_written(self, names: Sequence[str], within_s: float, hint: str) -> None:
        deadline = asyncio.get_running_loop().time() + within_s
        while not all(ready_file(self._folder, name).exists() for name in names):
            if not self.running:
                raise self.failure()
            if asyncio.get_running_loop().time() > deadline:
                log = log_file(self._folder, self.spec.name)
                raise UnreachableError(
                    f"{self.spec.name} was not ready within {within_s:.0f} s", hint=hint.format(log=log)
                )
            await asyncio.sleep(_READY_POLL_S)

    async def _until_loaded(
        self, loading: Loading, security: SecuritySection, frozen_after_s: float, reporting: asyncio.Task[None]
    ) -> None:
        bounds = loading_bounds(frozen_after_s, leaving_s=max(self.spec.drain_s, frozen_after_s))
        hint = "where models take longer to load, raise buffer.stall_limit_s; see {log}"
        written = asyncio.create_task(self._until_written((self.spec.name,), loading.most_s, hint))
        watching = asyncio.create_task(self._first_frozen(self.spec.answering, security, bounds))
        try:
            await asyncio.wait({written, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not written.done():
                raise watching.result()
            written.result()
        finally:
            for task in (written, watching, reporting):
                task.cancel()
            await asyncio.gather(written, watching, reporting, return_exceptions=True)

    async def _until_serving(self, address: str, security: SecuritySection, within_s: float) -> None:
        """Waits for the first answer to the health check, or for the end of the process, which gives a better error."""
        async with HealthProbe(address, security) as probe:
            answering = asyncio.create_task(probe.until_serving(max(_READY_POLL_S, within_s)))
            ending = asyncio.create_task(self._process.wait())
            try:
                await asyncio.wait({answering, ending}, return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    raise self.failure()
                try:
                    await answering
                except UnreachableError:
                    await asyncio.wait({ending}, timeout=_CAUSE_S)
                    if ending.done():
                        raise self.failure() from None
                    raise
            finally:
                answering.cancel()
                ending.cancel()
                await asyncio.gather(answering, ending, return_exceptions=True)

    async def wait_until_frozen(self, security: SecuritySection, frozen_after_s: float) -> FrozenServiceError:
        """Watches the service, once it is ready, and its parts; returns when one of them is frozen.

        Args:
            frozen_after_s: see `resources.frozen_after_s`.
        """
        bounds = Bounds.of(frozen_after_s, leaving_s=max(self.spec.drain_s, frozen_after_s))
        return await self._first_frozen((self.spec.name, *self.spec.parts), security, bounds)

    async def _first_frozen(
        self, names: Sequence[str], security: SecuritySection, bounds: Bounds
    ) -> FrozenServiceError:
        watches = [asyncio.create_task(self._watch(name, security, bounds), name=f"watch {name}") for name in names]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            name, verdict = done.pop().result()
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
        log = log_file(self._folder, self.spec.name)
        return FrozenServiceError(self.spec.name, name, verdict, tail(log, since=self._log_from), log=log)

    async def _watch(self, name: str, security: SecuritySection, bounds: Bounds) -> tuple[str, Frozen]:
        ready = self._ready(name)
        async with HealthProbe(ready.address, security) as probe:
            return name, await wait_until_frozen(partial(read_child_process, ready.pid), probe.ask, bounds)

    def _ready(self, name: str) -> _Ready:
        return _Ready(**json.loads(ready_file(self._folder, name).read_text(encoding="utf-8")))

    async def wait(self) -> int:
        """Waits for the end and returns the exit status; the rest of the process group is killed."""
        await self._process.wait()
        self._kill_group()
        return self.status

    @property
    def status(self) -> int:
        """Exit status of the ended process."""
        return self._process.status if self._process.status is not None else -1

    @property
    def ended_in_order(self) -> bool:
        """True where the process has ended in order; one that was asked before it could listen had nothing to end."""
        return self.status == 0 or (self._asked and self.status == -signal.SIGTERM)

    def failure(self) -> ServiceExitError:
        """The typed error for an unexpected end; lines of its log are shown where they add to it."""
        path = log_file(self._folder, self.spec.name)
        lines = tail(path, since=self._log_from)
        message, said_all = explain_exit(self.status, lines)
        message = self._overdue or message
        return ServiceExitError(self.spec.name, self.status, message, () if said_all else lines, hint=f"see {path}")

    def terminate(self) -> None:
        """Asks the service to end in order."""
        self._asked = True
        self._process.terminate()

    def kill(self) -> None:
        """Ends the whole process group at once."""
        self._kill_group()

    async def stop(self, security: SecuritySection, on_work: Callable[[str], None]) -> None:
        """Ends the service in order, by force once its time is over.

        Args:
            security: how to reach it.
            on_work: called with the final work that it is waited for, whenever that is other work.
        """
        self.terminate()
        now, final = asyncio.get_running_loop().time, self.spec.final_work
        clock = DrainClock(now(), idle_s=self.spec.drain_s, work_s=final.most_s if final is not None else 0.0)
        ending = asyncio.ensure_future(self._process.wait())
        try:
            while not (await asyncio.wait({ending}, timeout=clock.pause_s(now())))[0]:
                work = await final.read_phase(self.address, security) if final is not None and self.address else ""
                if clock.observe(now(), work):
                    on_work(work)
                if not clock.pause_s(now()):
                    self._overdue = clock.overdue(now())
                    self.kill()
                    await ending
        finally:
            ending.cancel()
        self._kill_group()

    def _kill_group(self) -> None:
        family = descendants(self._process.pid)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGCONT)


async def _start(
    command: Sequence[str], environment: Mapping[str, str], log: BinaryIO, fork_server: ForkServer | None
) -> Child:
    if fork_server is not None and (forked := await _fork(fork_server, command, environment, log)) is not None:
        return Child(forked)
    return await start_process(
        die_with_parent(command),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        start_new_session=True,
    )


async def _fork(
    fork_server: ForkServer, command: Sequence[str], environment: Mapping[str, str], log: BinaryIO
) -> ForkedProcess | None:
    """Waits in a thread: the server may load yet."""
    start = partial(fork_server.start, command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    order = asyncio.ensure_future(asyncio.to_thread(start))
    try:
        return await asyncio.shield(order)
    except asyncio.CancelledError:
        if (forked := await order) is not None:
            forked.kill()
        raise


def log_file(folder: Path, service: str) -> Path:
    return folder / "logs" / f"{service}.log"


def ready_file(folder: Path, service: str) -> Path:
    return folder / "services" / f"{service}.json"
