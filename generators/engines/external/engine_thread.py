"""The thread of an engine, from the start of its backend to its end.

Invariants: the backend is always stopped at the end, in bounded time, and every promise is kept or refused. A failure
is reported once. At a requested end, everything in flight gets its result first.
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
from rollmesh.generators.engines.errors import EngineError, ending_of
from rollmesh.generators.engines.external.backend import Backend
from rollmesh.generators.engines.external.command_executor import CommandExecutor
from rollmesh.generators.engines.external.inflight import InflightRegistry
from rollmesh.generators.engines.external.model_info import ModelInfo
from rollmesh.generators.engines.external.scheduler import RequestScheduler
from rollmesh.generators.engines.external.version_labels import VersionLabels
from rollmesh.generators.engines.interface import EngineListener
from rollmesh.generators.engines.types import EngineSettings

log = logging.getLogger(__name__)

# Seconds that a command, the jobs and the backend get to end once the engine ends.
_COMMAND_S = 5.0
_JOBS_S = 5.0
_BACKEND_S = 30.0


class EngineThread:
    """Runs an engine from its start to its end.

    Args:
        backend: does the work.
        model: that it runs.
        settings: of the engine.
        listener: receives tokens, results and the failure.
        inflight: shared with other threads.

    Attributes:
        scheduler, executor: to be used in the engine's thread, through `post`.
    """

    def __init__(
        self,
        backend: Backend,
        model: ModelInfo,
        settings: EngineSettings,
        listener: EngineListener,
        inflight: InflightRegistry,
    ) -> None:
        self._backend = backend
        self._model = model
        self._listener = listener
        self._inflight = inflight
        labels = VersionLabels()
        self.scheduler = RequestScheduler(backend, model, labels, settings.slots, self._notify, self._fail)
        self.executor = CommandExecutor(backend, self.scheduler, labels, settings.kv, self._notify)
        self._turn_scheduled = False
        self._end_requested, self._up = asyncio.Event(), asyncio.Event()
        self._pings: set[asyncio.Task[None]] = set()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread, and in it the backend."""
        self._thread.start()

    def post(self, work: Callable[..., None], *arguments: Any) -> None:
        """Runs `work` in the engine's thread; to be called inside `InflightRegistry.accepting`."""
        self._loop.call_soon_threadsafe(self._guarded, work, *arguments)

    def enqueue(self, command: EngineCommand) -> None:
        """Queues a command, as `post` does; where the engine fails before that, staged weights are given back."""
        self._loop.call_soon_threadsafe(self.executor.enqueue, command)

    def stop(self) -> None:
        """Ends the thread, after `InflightRegistry.stop_after`. Waits for it, in bounded time."""
        if self._thread.ident is None:
            # An engine that never ran keeps its promises too.
            self._thread.start()
        self._thread.join(_COMMAND_S + _JOBS_S + _BACKEND_S + 5)
        if self._thread.is_alive():
            log.error("the engine's thread does not end; it is abandoned")

    def ping(self, done: Future[None]) -> None:
        """Pings the backend; in the engine's thread. One that is starting is pinged once it is up."""
        if done.set_running_or_notify_cancel():
            task = self._loop.create_task(self._ping(done))
            self._pings.add(task)
            task.add_done_callback(self._on_ping_done)

    def end(self) -> None:
        """Begins the end; in the engine's thread."""
        self._end_requested.set()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        if not self._inflight.stopping:
            work = asyncio.create_task(self._work())
            ending = asyncio.create_task(self._end_requested.wait())
            await asyncio.wait({work, ending}, return_when=asyncio.FIRST_COMPLETED)
            if work.done() and (error := work.exception()) is not None:
                self._fail(error)
            ending.cancel()
            work.cancel()
            await asyncio.wait({work}, timeout=_COMMAND_S)
            if work.done() and not work.cancelled() and (error := work.exception()) is not None:
                log.debug("cut short by the end: %s", error)
        # After everything that was posted before the registry was closed.
        await self._end_requested.wait()
        await self._end()

    async def _work(self) -> None:
        limits = await self._backend.start(self._on_death)
        if limits.context < self._model.limits.context:
            raise EngineError(
                f"the engine takes sequences of {limits.context} tokens; asked for: {self._model.limits.context}",
                hint="lower rollout.max_prompt_tokens or max_response_tokens, or give it more memory for its KV cache",
            )
        self._inflight.mark_started()
        self._up.set()
        await self.executor.run()

    async def _ping(self, done: Future[None]) -> None:
        try:
            await self._up.wait()
            await self._backend.ping()
        except EngineError as error:
            if not done.done():
                done.set_exception(error)
        else:
            if not done.done():
                done.set_result(None)

    def _on_ping_done(self, task: asyncio.Task[None]) -> None:
        self._pings.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _end(self) -> None:
        for task in self._pings:
            task.cancel()
        if self._inflight.failure is None:
            self.scheduler.abort_all()
            self._guarded(self._turn)
            self._inflight.reject_promises(EngineError("the engine was stopped", hint="ask another generator"))
        await self.scheduler.close(_JOBS_S)
        try:
            await asyncio.wait_for(self._backend.stop(), _BACKEND_S)
        except Exception as error:  # noqa: BLE001 - a foreign engine's own code may raise anything at its end
            log.warning("the backend did not end as it should: %s: %s", type(error).__name__, error)
        self.executor.discard_all()

    # --- turns ---

    def _notify(self) -> None:
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self._loop.call_soon(self._guarded, self._turn)

    def _turn(self) -> None:
        """Fills slots, then reports to the listener; once per turn of the event loop in which something happened."""
        self._turn_scheduled = False
        if self.executor.may_start_jobs:
            self.scheduler.refill(pinned_only=self.executor.swap_is_waiting)
        events, results = self.scheduler.collect()
        if events:
            self._listener.on_tokens(events)
        if results:
            self._listener.on_results(results)
            self._inflight.mark_delivered([result.request_id for result in results])
        self.executor.wake()

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        if self._inflight.failure is not None:
            return
        try:
            work(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever a listener raises must be reported
            self._fail(error)

    # --- failure ---

    def _on_death(self, cause: str) -> None:
        self._fail(EngineError(f"the engine has died: {cause}"))

    def _fail(self, error: BaseException) -> None:
        if self._inflight.failure is not None:
            return
        failure = ending_of(error)
        if self.executor.may_start_jobs and (culprit := self.scheduler.trial_id):
            # Else it has ended at a swap or a sleep.
            failure.culprit, failure.raised = culprit, self._backend.last_error()
        self._inflight.fail(failure)
        self._end_requested.set()
        self._listener.on_failure(failure)
