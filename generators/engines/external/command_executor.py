"""Swaps, pauses, sleep and probes of one engine, one after the other. In the engine's event loop alone.

Invariants:

- One order is carried out at a time. Pauses, sleep and their ends keep their order; so do swaps; a swap that waits
  for pinned responses holds up none of the others.
- Nothing starts while an order other than a probe is carried out, nor while paused or asleep, nor without weights.
- The backend stands still during `load`, and continues after it only where no pause was requested.
- A version is known, and served, from the moment at which its weights are in the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from rollmesh.generators.engines.commands import Control, EngineCommand, Pause, Probe, Resume, Sleep, Update, Wake
from rollmesh.generators.engines.external.backend import Backend
from rollmesh.generators.engines.external.scheduler import RequestScheduler
from rollmesh.generators.engines.external.version_labels import VersionLabels, label_of
from rollmesh.generators.engines.interface import EngineError, EngineState, KvPolicy, ProbeResult, SleepReport
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion


class CommandExecutor:
    """Carries orders out.

    Args:
        backend: does it.
        dispatcher: has the jobs.
        labels: learn of every version that was loaded.
        kv: what becomes of running responses at a swap.
        notify: calls for a turn of the engine, since something may start.

    Attributes:
        state: running, paused or asleep.
        serving, digest: of the weights in service; None and empty where there are none.
        swaps: done.
    """

    def __init__(
        self,
        backend: Backend,
        dispatcher: RequestScheduler,
        labels: VersionLabels,
        kv: KvPolicy,
        notify: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._dispatcher = dispatcher
        self._labels = labels
        self._kv = kv
        self._notify = notify
        self._controls: deque[Control] = deque()
        self._probes: deque[Probe] = deque()
        self._updates: deque[Update[Any]] = deque()
        self._changed = asyncio.Event()
        self._busy = False
        self._halted = False
        self.state: EngineState = "running"
        self.serving: PolicyVersion | None = None
        self.digest = ""
        self.swaps = 0

    @property
    def open(self) -> bool:
        """Whether responses may start."""
        return self.state == "running" and self.serving is not None and not self._busy

    @property
    def swap_waits(self) -> bool:
        """Whether a swap does, so that only pinned responses may start."""
        return bool(self._updates)

    def enqueue(self, order: EngineCommand) -> None:
        """Queues a command."""
        if isinstance(order, Update):
            self._updates.append(order)
        elif isinstance(order, Probe):
            self._probes.append(order)
        else:
            self._controls.append(order)
        self.wake()

    def wake(self) -> None:
        """Something has changed: an order may have become possible, or have been called off, or refused."""
        called_off = [update for update in self._updates if update.done.done()]
        for update in called_off:
            self._updates.remove(update)
            self._backend.discard(update.staged)
        if called_off:
            self._notify()
        self._changed.set()

    async def run(self) -> None:
        """Carries orders out until it is cancelled.

        Raises:
            EngineError: the backend cannot go on.
        """
        while True:
            order = self._next()
            if order is None:
                self._changed.clear()
                await self._changed.wait()
            elif isinstance(order, Probe):
                await self._probe(order)
            elif _is_refused(order) or not order.done.set_running_or_notify_cancel():
                if isinstance(order, Update):
                    self._backend.discard(order.staged)
                self._notify()
            else:
                self._busy = True
                try:
                    # What was given out in this turn reaches the backend first: it knows the jobs that it will stop.
                    await asyncio.sleep(0)
                    await self._carry_out(order)
                finally:
                    self._busy = False
                self._notify()

    def discard_all(self) -> None:
        """Gives back what will not be loaded any more."""
        while self._updates:
            self._backend.discard(self._updates.popleft().staged)

    def _next(self) -> EngineCommand | None:
        if self._controls:
            return self._controls.popleft()
        if self._probes:
            return self._probes.popleft()
        if self._updates and (self.serving is None or not self._dispatcher.pinned):
            return self._updates.popleft()
        return None

    async def _carry_out(self, order: Control | Update[Any]) -> None:
        match order:
            case Update():
                await self._swap(order)
            case Pause():
                if self.state == "running":
                    await self._halt()
                    self.state = "paused"
                order.done.set_result(None)
            case Resume():
                if self.state == "asleep":
                    order.done.set_exception(EngineError("the engine is asleep", hint="wake it"))
                    return
                self.state = "running"
                await self._go_on()
                order.done.set_result(None)
            case Sleep():
                order.done.set_result(await self._sleep(keep_weights=order.keep_weights))
            case Wake():
                if self.state == "asleep":
                    await self._backend.wake()
                    self.state = "running"
                    await self._go_on()
                order.done.set_result(None)

    async def _swap(self, update: Update[Any]) -> None:
        begin = time.perf_counter()
        try:
            if self._kv == "interrupt":
                await self._dispatcher.interrupt()
            await self._halt()
        except BaseException:
            self._backend.discard(update.staged)
            raise
        in_flight = self._dispatcher.in_flight
        try:
            await self._backend.load(update.staged, label_of(update.version), recompute=self._kv != "keep")
        except WeightsError as error:
            await self._go_on()
            update.done.set_exception(error)
            return
        self._labels.loaded(update.version)
        self.serving, self.digest = update.version, update.digest
        self.swaps += 1
        await self._go_on()
        end = time.perf_counter()
        # The engine prefills sequences again in the steps that follow, among others that decode.
        update.done.set_result(update.timings(begin, end, in_flight))

    async def _probe(self, probe: Probe) -> None:
        if not probe.done.set_running_or_notify_cancel():
            return
        if self.serving is None:
            probe.done.set_exception(WeightsError("the engine has no weights"))
            return
        if self.state == "asleep":
            probe.done.set_exception(EngineError("the engine is asleep", hint="wake it"))
            return
        paused = self._halted
        if paused:
            # It runs nothing while it stands still: responses give their jobs up, and go on from their tokens later.
            self._busy = True
            await self._dispatcher.interrupt()
            await self._backend.resume()
            self._halted = False
        try:
            log_probs = await self._backend.log_probs(probe.token_ids)
        except EngineError as error:
            probe.done.set_exception(error)
        else:
            probe.done.set_result(ProbeResult(self.serving, self.digest, log_probs, None))
        if paused:
            await self._halt()
            self._busy = False

    async def _sleep(self, *, keep_weights: bool) -> SleepReport:
        if self.state == "asleep":
            return SleepReport(0, 0.0)
        begin = time.perf_counter()
        await self._dispatcher.interrupt()
        await self._halt()
        report = await self._backend.sleep(keep_weights=keep_weights)
        self.state = "asleep"
        if not keep_weights:
            self.serving, self.digest = None, ""
            self._dispatcher.abort_pinned()
        return SleepReport(report.freed_bytes, time.perf_counter() - begin)

    async def _halt(self) -> None:
        if not self._halted:
            await self._backend.pause()
            self._halted = True

    async def _go_on(self) -> None:
        """Resumes the backend where there are weights and no pause was requested."""
        if self._halted and self.state == "running" and self.serving is not None:
            await self._backend.resume()
            self._halted = False


def _is_refused(order: EngineCommand) -> bool:
    """Whether the engine has ended under it."""
    return order.done.done() and not order.done.cancelled()
