"""The thread of an engine, from the start of its backend to its end.

Invariants: whatever happens, the backend is stopped at the end, in bounded time, and what was promised is kept or
refused. A failure is told once. At an end that was asked for, everything in flight gets its result first.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import uvloop

from rollmesh.generators.engines.commands import EngineCommand
from rollmesh.generators.engines.errors import ending_of
from rollmesh.generators.engines.external.backend import Backend
from rollmesh.generators.engines.external.command_executor import CommandExecutor
from rollmesh.generators.engines.external.inflight import InflightRegistry
from rollmesh.generators.engines.external.model_info import ModelInfo
from rollmesh.generators.engines.external.scheduler import RequestScheduler
from rollmesh.generators.engines.external.version_labels import VersionLabels
from rollmesh.generators.engines.interface import EngineError, EngineListener, EngineSettings

log = logging.getLogger(__name__)

# Seconds that an order, the jobs and the backend get to end once the engine ends.
_ORDER_S = 5.0
_JOBS_S = 5.0
_BACKEND_S = 30.0


class EngineThread:
    """Runs an engine.

    Args:
        backend: does the work.
        model: that it runs.
        settings: of the engine.
        listener: is told what comes of it.
        gate: shared with other threads.

    Attributes:
        dispatcher, conductor: to be used in the engine's thread, through `post`.
    """

    def __init__(
        self,
        backend: Backend,
        model: ModelInfo,
        settings: EngineSettings,
        listener: EngineListener,
        gate: InflightRegistry,
    ) -> None:
        self._backend = backend
        self._model = model
        self._listener = listener
        self._gate = gate
        labels = VersionLabels()
        self.dispatcher = RequestScheduler(backend, model, labels, settings.slots, self._notify, self._fail)
        self.conductor = CommandExecutor(backend, self.dispatcher, labels, settings.kv, self._notify)
        self._turning = False
        self._ending = asyncio.Event()
        self._pings: set[asyncio.Task[None]] = set()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread, and in it the backend."""
        self._thread.start()

    def post(self, work: Callable[..., None], *arguments: Any) -> None:
        """Has something done in the engine's thread; to be called while the gate is held open."""
        self._loop.call_soon_threadsafe(self._guarded, work, *arguments)

    def order(self, order: EngineCommand) -> None:
        """Has an order taken, as `post` does; where the engine fails before that, what it brings is given back."""
        self._loop.call_soon_threadsafe(self.conductor.enqueue, order)

    def stop(self) -> None:
        """Ends the thread; the gate is closed. Waits for it, in bounded time."""
        if self._thread.ident is None:
            # What was promised is kept also by an engine that never ran.
            self._thread.start()
        self._thread.join(_ORDER_S + _JOBS_S + _BACKEND_S + 5)
        if self._thread.is_alive():
            log.error("the engine's thread does not end; it is left behind")

    def ping(self, done: Future[None]) -> None:
        """Has the backend asked; in the engine's thread. One that is starting has a deadline of its own."""
        if done.set_running_or_notify_cancel():
            task = self._loop.create_task(self._ping(done))
            self._pings.add(task)
            task.add_done_callback(self._pinged)

    def end(self) -> None:
        """Begins the end; in the engine's thread."""
        self._ending.set()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        if not self._gate.stopping:
            work = asyncio.create_task(self._work())
            ending = asyncio.create_task(self._ending.wait())
            await asyncio.wait({work, ending}, return_when=asyncio.FIRST_COMPLETED)
            if work.done() and (error := work.exception()) is not None:
                self._fail(error)
            ending.cancel()
            work.cancel()
            await asyncio.wait({work}, timeout=_ORDER_S)
            if work.done() and not work.cancelled() and (error := work.exception()) is not None:
                log.debug("cut short by the end: %s", error)
        # Behind everything that was posted before the gate was closed.
        await self._ending.wait()
        await self._end()

    async def _work(self) -> None:
        limits = await self._backend.start(self._died)
        if limits.context < self._model.limits.context:
            raise EngineError(
                f"the engine takes sequences of {limits.context} tokens; asked for: {self._model.limits.context}",
                hint="lower rollout.max_prompt_tokens or max_response_tokens, or give it more memory for its KV cache",
            )
        self._gate.started()
        await self.conductor.run()

    async def _ping(self, done: Future[None]) -> None:
        try:
            if self._gate.up:
                await self._backend.ping()
        except EngineError as error:
            if not done.done():
                done.set_exception(error)
        else:
            if not done.done():
                done.set_result(None)

    def _pinged(self, task: asyncio.Task[None]) -> None:
        self._pings.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _end(self) -> None:
        for task in self._pings:
            task.cancel()
        if self._gate.failure is None:
            self.dispatcher.abort_all()
            self._guarded(self._turn)
            self._gate.refuse_all(EngineError("the engine was stopped", hint="ask another generator"))
        await self.dispatcher.close(_JOBS_S)
        try:
            await asyncio.wait_for(self._backend.stop(), _BACKEND_S)
        except Exception as error:  # noqa: BLE001 - a foreign engine's own code may raise anything at its end
            log.warning("the backend did not end as it should: %s: %s", type(error).__name__, error)
        self.conductor.discard_all()

    # --- turns ---

    def _notify(self) -> None:
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._guarded, self._turn)

    def _turn(self) -> None:
        """Once per turn of the event loop in which something happened: places are filled, then listeners told."""
        self._turning = False
        if self.conductor.open:
            self.dispatcher.refill(pinned_only=self.conductor.swap_waits)
        events, results = self.dispatcher.collect()
        if events:
            self._listener.on_tokens(events)
        if results:
            self._listener.on_results(results)
            self._gate.ended([result.request_id for result in results])
        self.conductor.wake()

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        if self._gate.failure is not None:
            return
        try:
            work(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever a listener raises must be reported
            self._fail(error)

    # --- failure ---

    def _died(self, cause: str) -> None:
        self._fail(EngineError(f"the engine has died: {cause}"))

    def _fail(self, error: BaseException) -> None:
        if self._gate.failure is not None:
            return
        failure = ending_of(error)
        if self.conductor.open and (culprit := self.dispatcher.on_trial):
            # Else it has ended at a swap or a sleep.
            failure.culprit, failure.raised = culprit, self._backend.last_error()
        self._gate.fail(failure)
        self._ending.set()
        self._listener.on_failure(failure)
