"""Swaps, pauses, sleep and probes of one engine, one at a time. In the engine's event loop alone.

Invariants:

- One command is executed at a time. Pauses, sleep and their ends keep their order; so do swaps. A swap that waits for
  pinned responses does not delay the others.
- No job starts while a command other than a probe is executed, nor while paused or asleep, nor without weights.
- The backend is paused during `load`, and continues after it only where no pause was requested.
- A version is known, and served, from the moment at which its weights are in the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rollmesh.generators.engines.commands import (
    Control,
    EngineCommand,
    Inspect,
    Pause,
    Probe,
    Resume,
    Sleep,
    UpdateWeights,
    Wake,
)
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.external.backend import Backend
from rollmesh.generators.engines.external.scheduler import RequestScheduler
from rollmesh.generators.engines.external.version_labels import VersionLabels, label_of
from rollmesh.generators.engines.types import (
    EngineState,
    KvPolicy,
    ProbeResult,
    ServedWeights,
    SleepLevel,
    SleepReport,
    WakeStep,
)
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion


class CommandExecutor:
    """Executes commands.

    Args:
        backend: executes them.
        scheduler: has the jobs.
        labels: of every version that was loaded.
        kv: the treatment of running responses at a swap.
        notify: calls for a turn of the engine, since something may start.

    Attributes:
        state: running, paused or asleep.
        serving, digest: of the weights in service; None and empty without weights.
        swaps: done.
    """

    def __init__(
        self,
        backend: Backend,
        scheduler: RequestScheduler,
        labels: VersionLabels,
        kv: KvPolicy,
        notify: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._scheduler = scheduler
        self._labels = labels
        self._kv = kv
        self._notify = notify
        self._controls: deque[Control] = deque()
        self._probes: deque[Probe] = deque()
        self._updates: deque[UpdateWeights[Any]] = deque()
        self._changed = asyncio.Event()
        self._busy = False
        self._backend_paused = False
        # The memory that the backend has given back; None while it has all.
        self._level: SleepLevel | None = None
        self.state: EngineState = "running"
        self.serving: PolicyVersion | None = None
        self.digest = ""
        self.swaps = 0

    @property
    def may_start_jobs(self) -> bool:
        """True where responses may start."""
        return self.state == "running" and self.serving is not None and not self._busy

    @property
    def swap_is_waiting(self) -> bool:
        """True while a swap waits, so that only pinned responses may start."""
        return bool(self._updates)

    def enqueue(self, command: EngineCommand) -> None:
        """Queues a command."""
        if isinstance(command, UpdateWeights):
            self._updates.append(command)
        elif isinstance(command, Inspect):
            self._inspect(command)
        elif isinstance(command, Probe):
            self._probes.append(command)
        else:
            self._controls.append(command)
        self.wake()

    def wake(self) -> None:
        """Checks the queues again: a command may have become possible, or have been cancelled, or refused."""
        cancelled = [update for update in self._updates if update.done.done()]
        for update in cancelled:
            self._updates.remove(update)
            self._discard(update)
        if cancelled:
            self._notify()
        self._changed.set()

    async def run(self) -> None:
        """Executes commands until it is cancelled.

        Raises:
            EngineError: the backend cannot continue.
        """
        while True:
            command = self._next()
            if command is None:
                self._changed.clear()
                await self._changed.wait()
            elif isinstance(command, Probe):
                await self._probe(command)
            elif _is_refused(command) or not command.done.set_running_or_notify_cancel():
                if isinstance(command, UpdateWeights):
                    self._discard(command)
                self._notify()
            else:
                self._busy = True
                try:
                    # Jobs that were started in this turn reach the backend first: it knows those that it will stop.
                    await asyncio.sleep(0)
                    await self._execute(command)
                finally:
                    self._busy = False
                self._notify()

    def discard_all(self) -> None:
        """Discards staged weights that will not be loaded any more."""
        while self._updates:
            self._discard(self._updates.popleft())

    def _next(self) -> Control | Probe | UpdateWeights[Any] | None:
        if self._controls:
            return self._controls.popleft()
        if self._probes:
            return self._probes.popleft()
        if self._updates and (self.serving is None or not self._scheduler.pinned):
            return self._updates.popleft()
        return None

    async def _execute(self, command: Control | UpdateWeights[Any]) -> None:
        match command:
            case UpdateWeights():
                await self._swap(command)
            case Pause():
                if self.state == "running":
                    await self._pause_backend()
                    self.state = "paused"
                command.done.set_result(None)
            case Resume():
                if self.state == "asleep":
                    command.done.set_exception(EngineError("the engine is asleep", hint="wake it"))
                    return
                self.state = "running"
                await self._resume_backend()
                command.done.set_result(None)
            case Sleep():
                command.done.set_result(await self._sleep(command.level))
            case Wake():
                if self.state == "asleep":
                    await self._wake_backend(command.step)
                command.done.set_result(None)

    async def _swap(self, update: UpdateWeights[Any]) -> None:
        begin = time.perf_counter()
        if update.staged is None:
            if not update.refuse_other_weights(self.digest):
                self._labels.rename(update.version)
                self.serving = update.version
                update.done.set_result(update.timings(begin, time.perf_counter(), self._scheduler.in_flight))
            return
        try:
            if self._kv == "interrupt" or self._backend.interrupts(update.staged, recompute=self._kv != "keep"):
                await self._scheduler.interrupt()
            await self._pause_backend()
        except BaseException:
            self._discard(update)
            raise
        in_flight = self._scheduler.in_flight
        try:
            await self._backend.load(update.staged, label_of(update.version), recompute=self._kv != "keep")
        except WeightsError as error:
            await self._resume_backend()
            update.done.set_exception(error)
            return
        if self._level is not None:
            # It has taken the memory of the weights.
            self._level = SleepLevel.WITHOUT_KV_CACHE
        self._labels.add(update.version)
        self.serving, self.digest = update.version, update.digest
        self.swaps += 1
        await self._resume_backend()
        end = time.perf_counter()
        # The engine prefills sequences again in the steps that follow, among others that decode.
        update.done.set_result(update.timings(begin, end, in_flight))

    def _discard(self, update: UpdateWeights[Any]) -> None:
        if update.staged is not None:
            self._backend.discard(update.staged)

    async def _probe(self, probe: Probe) -> None:
        if not probe.done.set_running_or_notify_cancel():
            return
        if self.serving is None:
            probe.done.set_exception(WeightsError("the engine has no weights"))
            return
        if self.state == "asleep":
            probe.done.set_exception(EngineError("the engine is asleep", hint="wake it"))
            return
        paused = self._backend_paused
        if paused:
            # It runs nothing while it is paused: responses give their jobs up, and continue from their tokens later.
            self._busy = True
            await self._scheduler.interrupt()
            await self._backend.resume()
            self._backend_paused = False
        try:
            log_probs = await self._backend.log_probs(probe.token_ids)
        except EngineError as error:
            probe.done.set_exception(error)
        else:
            probe.done.set_result(ProbeResult(self.serving, self.digest, log_probs, None))
        if paused:
            await self._pause_backend()
            self._busy = False

    async def _sleep(self, level: SleepLevel) -> SleepReport:
        begin = time.perf_counter()
        if self._level is None:
            await self._scheduler.interrupt()
            await self._pause_backend()
        elif level <= self._level:
            return SleepReport(0, 0.0)
        report = await self._backend.sleep(level)
        self.state, self._level = "asleep", level
        if level >= SleepLevel.WITHOUT_WEIGHTS:
            self.serving, self.digest = None, ""
            self._scheduler.abort_pinned()
        return SleepReport(report.freed_bytes, time.perf_counter() - begin)

    async def _wake_backend(self, step: WakeStep) -> None:
        await self._backend.wake(step)
        if step >= WakeStep.KV_CACHE:
            self.state, self._level = "paused", None
        else:
            self._level = SleepLevel.WITHOUT_KV_CACHE

    def _inspect(self, command: Inspect) -> None:
        if not command.done.set_running_or_notify_cancel():
            return
        if self.serving is None:
            command.done.set_exception(WeightsError("the engine has no weights"))
        else:
            command.done.set_result(ServedWeights(self.serving, self.digest, None))

    async def _pause_backend(self) -> None:
        if not self._backend_paused:
            await self._backend.pause()
            self._backend_paused = True

    async def _resume_backend(self) -> None:
        """Resumes the backend where there are weights and no pause was requested."""
        if self._backend_paused and self.state == "running" and self.serving is not None:
            await self._backend.resume()
            self._backend_paused = False


def _is_refused(command: EngineCommand) -> bool:
    """True where the engine has ended before the command was executed."""
    return command.done.done() and not command.done.cancelled()
