"""Keeps a set of services running until the run is over, then ends them in order.

Invariants:
- services are started in the given stages, a stage only when the one before it is healthy;
- a service that has stopped answering is killed (`mesh.liveness` says when), and then treated like one that died;
- a service that leaves in order (status 0: it was drained, or the run has finished) is not started again. One that dies
  is restarted with backoff while its budget lasts (`backoff`). A failure that a restart cannot fix ends the run at once
  and is its error: a wrong configuration, missing data, a fenced learner;
- the run ends when the completing service exits with 0, when it is asked to, or with an error. In every case each
  process has ended before `run` returns, in the drain order unless it was asked to hurry. A service that does not end
  in order is named, with the reason;
- services may be replaced by others while the rest continues. A replacement that gives up ends only its own trial,
  until it is kept.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rollmesh.launcher.backoff import Restarts
from rollmesh.launcher.errors import FrozenServiceError, ServiceExitError
from rollmesh.launcher.service_process import ServiceProcess, ServiceSpec
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import (
    PERMANENT,
    FencedError,
    PortInUseError,
    RewardError,
    RollmeshError,
    RunBusyError,
    TakeoverRefusedError,
)
from rollmesh.mesh.runtime.fork_server.client import ForkServer
from rollmesh.report.restarts import Reason, record_restart

# As `PERMANENT`, but only before the service was ever healthy: later they may be the echo of its predecessor's end.
_PERMANENT_AT_FIRST = frozenset(
    error.exit_code for error in (PortInUseError, RewardError, RunBusyError, TakeoverRefusedError)
)
_HURRY = "Ctrl-C again kills at once"


@dataclass
class Observer:
    """Callbacks for the launcher's events; each is called on the event loop."""

    event: Callable[[str], None] = field(default=lambda _text: None)
    tail: Callable[[str, Sequence[str]], None] = field(default=lambda _service, _lines: None)


@dataclass
class _Service:
    spec: ServiceSpec
    restarts: Restarts
    healthy: asyncio.Event = field(default_factory=asyncio.Event)
    process: ServiceProcess | None = None
    task: asyncio.Task[None] | None = None
    address: str | None = None
    starts: int = 0
    # It has no process yet.
    starting: bool = False
    # Another one takes its place: it is not restarted.
    leaving: bool = False
    # A replacement that is not kept yet.
    on_trial: bool = False


class Supervisor:
    """Runs services as local processes.

    Args:
        folder: run folder (logs, ready files, restarts).
        security: how to reach the services' health.
        max_restarts: see `Restarts`.
        frozen_after_s: see `resources.frozen_after_s`; 0: silence is never a failure.
        observer: notified of starts, deaths and restarts.
        before_last: awaited once, when all but the services that end last have ended (to read final counts).
        fork_server: forks services if that is possible; None: all are executed.

    Attributes:
        trial_error: the error of a replacement that gave up before it was kept.
    """

    def __init__(
        self,
        folder: Path,
        *,
        security: SecuritySection,
        max_restarts: int,
        frozen_after_s: float,
        observer: Observer,
        before_last: Callable[[], Awaitable[None]] | None = None,
        fork_server: ForkServer | None = None,
    ) -> None:
        self._fork_server = fork_server
        self._folder = folder
        self._security = security
        self._max_restarts = max_restarts
        self._frozen_after_s = frozen_after_s
        self._observer = observer
        self._before_last = before_last
        self._services: dict[str, _Service] = {}
        self._over = asyncio.Event()
        self._hurry = asyncio.Event()
        self._error: RollmeshError | None = None
        # Held while services are replaced, and while all are ended.
        self._changing = asyncio.Lock()
        self._trial_over = asyncio.Event()
        self.trial_error: RollmeshError | None = None
        self.interrupted = False

    def interrupt(self) -> None:
        """Asks for an orderly end; asked a second time, kills what still runs."""
        if self.interrupted:
            self._observer.event("killing the services")
            self._hurry.set()
            for service in self._services.values():
                if service.process is not None:
                    service.process.kill()
            return
        self.interrupted = True
        self._observer.event(f"draining: generators, learner, reward service, buffer ({_HURRY})")
        self._over.set()

    def _abandon_starts(self) -> None:
        """Ends starts that wait for the server, which may load for minutes yet; they execute nothing instead."""
        for service in self._services.values():
            if service.starting and service.task is not None:
                service.task.cancel()
                if self._fork_server is not None:
                    self._fork_server.close()

    def pids(self) -> dict[str, int]:
        """Process id of each running service by name."""
        return {
            name: service.process.pid
            for name, service in self._services.items()
            if service.process is not None and service.process.running
        }

    def address(self, name: str) -> str:
        """Address of a service; empty before it was first healthy."""
        service = self._services.get(name)
        return (service.address if service else None) or ""

    async def run(
        self, stages: Sequence[Callable[[], Sequence[ServiceSpec]]], drain_order: Callable[[str], int]
    ) -> None:
        """Runs the services to the end of the run.

        Args:
            stages: the stages' specifications; a stage is built when the one before it is healthy (so that it can
                use `address`).
            drain_order: rank of a service by name; lower ranks end first, equal ranks together.

        Raises:
            RollmeshError: what ended the run, where it was neither completed nor interrupted.
        """
        try:
            for stage in stages:
                started = [self._launch(spec) for spec in stage()]
                if not await self._healthy_or_ended(started):
                    break
            await self._over.wait()
        finally:
            await self._drain(drain_order)
        if self._error is not None and not self.interrupted:
            raise self._error

    async def until_healthy(self, names: Sequence[str]) -> None:
        """Waits until services have been healthy once. The run's end does not end the wait."""
        await asyncio.gather(*(self._services[name].healthy.wait() for name in names))

    async def replace(
        self, ending: Collection[str], specs: Sequence[ServiceSpec], drain_order: Callable[[str], int]
    ) -> None:
        """Ends services in order, and starts others; returns when these are healthy, or the run is over.

        Args:
            ending: names of the services to be ended.
            specs: of the others, which may have the same names.
            drain_order: as of `run`.

        Raises:
            RollmeshError: one of the others cannot run. Those that do stay; replace them in turn.
        """
        async with self._changing:
            await self._end_all([self._services[name] for name in ending if name in self._services], drain_order)
            if self._over.is_set():
                return
            self.trial_error = None
            self._trial_over.clear()
            for name in ending:
                self._services.pop(name, None)
            started = [self._launch(spec, on_trial=True) for spec in specs]
        await self._healthy_or_ended(started)
        if self.trial_error is not None:
            raise self.trial_error

    def keep(self) -> None:
        """Keeps the replacements: what has ended one of them for good, or will, ends the run."""
        for service in self._services.values():
            service.on_trial = False
        if self.trial_error is not None:
            self._fail(self.trial_error)

    def _launch(self, spec: ServiceSpec, *, on_trial: bool = False) -> _Service:
        service = _Service(spec, Restarts(self._max_restarts), starts=int(on_trial), on_trial=on_trial)
        self._services[spec.name] = service
        service.task = asyncio.create_task(self._keep_running(service), name=f"supervise {spec.name}")
        service.task.add_done_callback(partial(self._check_supervision, spec.name))
        return service

    def _check_supervision(self, name: str, task: asyncio.Task[None]) -> None:
        """Ends the run when the task that watches a service has ended."""
        if not task.cancelled() and (error := task.exception()) is not None:
            failure = RollmeshError(f"{name} cannot be supervised: {error!r}", hint="see its log in the run folder")
            failure.__cause__ = error
            self._fail(failure)

    async def _healthy_or_ended(self, services: Sequence[_Service]) -> bool:
        over, failed = asyncio.create_task(self._over.wait()), asyncio.create_task(self._trial_over.wait())
        waiting = [asyncio.create_task(service.healthy.wait()) for service in services]
        everyone = asyncio.create_task(asyncio.wait(waiting))
        try:
            await asyncio.wait([over, failed, everyone], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (over, failed, everyone, *waiting):
                task.cancel()
            await asyncio.gather(over, failed, everyone, *waiting, return_exceptions=True)
        return not self._over.is_set()

    async def _keep_running(self, service: _Service) -> None:
        name = service.spec.name
        while not (self._over.is_set() or service.leaving):
            error = await self._run_once(service)
            if self._over.is_set() or service.leaving:
                self._report_unclean_end(error)
                return
            if error is None:
                if service.spec.completes_run:
                    self._over.set()
                else:
                    self._observer.event(f"{name} has left")
                return
            if self._is_permanent(error, service):
                self._give_up(service, error)
                return
            reason = error.reason if isinstance(error, ServiceExitError) else "exit"
            delay = service.restarts.grant(asyncio.get_running_loop().time(), reason)
            if delay is None:
                self._give_up(service, _exhausted(error, name, service.restarts.used_up(reason)))
                return
            self._record_restart(name, reason)
            self._observer.event(f"{error.message}; restarting in {delay:.2g} s")
            await self._pause(delay)

    def _report_unclean_end(self, error: RollmeshError | None) -> None:
        """Reports a service that did not end in order while all are ended, because nothing else would."""
        if error is not None and not self._hurry.is_set():
            self._observer.event(str(error))

    def _record_restart(self, name: str, reason: Reason) -> None:
        try:
            record_restart(self._folder, name, reason, time.time())
        except OSError as full:
            self._observer.event(f"a restart of {name} was not recorded: {full.strerror}")

    async def _run_once(self, service: _Service) -> RollmeshError | None:
        """Starts the service and waits for its end; None for an end in order."""
        spec = service.spec
        restart = service.starts > 0
        service.starts += 1
        service.starting = True
        try:
            process = await ServiceProcess.start(spec, self._folder, restart=restart, fork_server=self._fork_server)
        except OSError as error:
            return RollmeshError(f"{spec.name} cannot be started: {error}", hint="is there memory and disk space left?")
        finally:
            service.starting = False
        service.process = process
        if self._over.is_set() or service.leaving:
            return None
        try:
            service.address = await process.wait_ready(self._security, self._frozen_after_s, self._observer.event)
            self._observer.event(f"{spec.name} {'is back' if restart else 'is up'} at {service.address}")
            service.healthy.set()
            frozen = await self._until_end(process)
        except RollmeshError as error:
            # A service that runs but never became healthy must not stay next to its successor.
            process.kill()
            await process.wait()
            may_end = spec.completes_run or self._over.is_set() or service.leaving
            return None if may_end and process.ended_in_order else error
        return frozen or (None if process.ended_in_order else process.failure())

    async def _until_end(self, process: ServiceProcess) -> FrozenServiceError | None:
        """Waits for the process's end; raises its error where it was killed because it was frozen."""
        ending = asyncio.create_task(process.wait())
        watching = asyncio.create_task(process.wait_until_frozen(self._security, self._frozen_after_s))
        try:
            await asyncio.wait({ending, watching}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return None
            frozen = watching.result()
            process.kill()
            await ending
            return frozen
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def _is_permanent(self, error: RollmeshError, service: _Service) -> bool:
        status = error.status if isinstance(error, ServiceExitError) else error.exit_code
        return status in PERMANENT or (not service.healthy.is_set() and status in _PERMANENT_AT_FIRST)

    def _give_up(self, service: _Service, error: RollmeshError) -> None:
        """Ends the run, or the trial of a replacement; another learner that has the run ends it in any case."""
        fenced = isinstance(error, ServiceExitError) and error.status == FencedError.exit_code
        if service.on_trial and not fenced:
            self.trial_error = self.trial_error or error
            self._trial_over.set()
            return
        self._fail(error)

    def _fail(self, error: RollmeshError) -> None:
        if isinstance(error, ServiceExitError) and error.log_tail:
            self._observer.tail(error.service, error.log_tail)
        self._error = self._error or error
        self._over.set()

    async def _pause(self, delay_s: float) -> None:
        try:
            await asyncio.wait_for(self._over.wait(), delay_s)
        except TimeoutError:
            return

    async def _drain(self, drain_order: Callable[[str], int]) -> None:
        self._over.set()
        self._abandon_starts()
        async with self._changing:
            await self._end_all(list(self._services.values()), drain_order, self._before_last)

    async def _end_all(
        self,
        services: Sequence[_Service],
        drain_order: Callable[[str], int],
        before_last: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Ends services in order."""
        ranks = sorted({drain_order(service.spec.name) for service in services})
        for rank in ranks:
            if rank == ranks[-1] and before_last is not None and not self._hurry.is_set():
                await before_last()
            same = [service for service in services if drain_order(service.spec.name) == rank]
            await asyncio.gather(*(self._end(service) for service in same))

    async def _end(self, service: _Service) -> None:
        service.leaving = True
        process = service.process
        if process is not None and process.running:
            await self._stop(process)
        if service.task is not None:
            await asyncio.gather(service.task, return_exceptions=True)
        # Its task may have been between two processes just then.
        if service.process is not None and service.process is not process:
            await self._stop(service.process)

    async def _stop(self, process: ServiceProcess) -> None:
        def report(work: str) -> None:
            self._observer.event(f"waits for the {process.spec.name}: {work} ({_HURRY})")

        if self._hurry.is_set():
            process.kill()
        await process.stop(self._security, report)


def _exhausted(error: RollmeshError, name: str, used_up: str) -> RollmeshError:
    if isinstance(error, ServiceExitError):
        message = error.message.removeprefix(f"{name}: ")
        return ServiceExitError(
            name,
            error.status,
            f"{used_up}; last: {message}",
            error.log_tail,
            hint=error.hint or "raise resources.max_restarts if that is expected",
        )
    return error
