"""Hands responses to the backend as jobs and keeps the books of what comes back. In the engine's event loop alone.

Invariants:

- Every response in the books has its images read, waits in the line, or has exactly one job whose tokens count. A job
  that was given up (its response has ended) keeps its place with the backend until the backend says that it is over,
  and is not listened to.
- The backend has at most `slots` jobs and one more for every eight slots: these stand in its own line, so that it
  refills a slot in the very step in which one becomes free, and the place they leave is filled again in the same turn
  of the event loop. All others wait here, where order, pinning and aborts are ours.
- While a request that starts alone has a job and no token yet nothing else starts: an engine that ends, ends at that.
- What has ended and what was streamed is handed out once per turn of the event loop, all of it together.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollmesh.generators.engines.external.backend import Backend, DecodeChunk, DecodeJob
from rollmesh.generators.engines.external.model_info import ModelInfo
from rollmesh.generators.engines.external.request_state import RequestState
from rollmesh.generators.engines.external.version_labels import VersionLabels
from rollmesh.generators.engines.external.waiting_queue import WaitingQueue
from rollmesh.generators.engines.interface import (
    REQUEST_ATTEMPTS,
    EngineError,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    PartialResponse,
    RequestError,
    TokenEvent,
)
from rollmesh.generators.engines.request_validation import expand_images
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.trajectory.images import ImageProcessor

log = logging.getLogger(__name__)

# Slots for each of which the backend gets one job more than it can decode.
_SLOTS_PER_SPARE = 8
# Seconds that a backend gets to end the jobs that it was told to end; one that hangs is found before (`engine_watch`).
_ABORT_S = 600.0


@dataclass(slots=True, eq=False)
class Running:
    """A job that the backend has; its response is None where it was given up."""

    job_id: str
    response: RequestState | None


class RequestScheduler:
    """The books of one engine.

    Args:
        backend: runs the jobs.
        model: that it runs.
        labels: of the weights it was given.
        slots: sequences that it decodes together.
        notify: something has ended, was streamed, or may start; calls for a turn.
        fail: ends the engine.

    Attributes:
        tokens_generated: tokens taken.
        tokens_outside: of those, of requests from outside of the run.
        pinned: pinned responses that have not ended.
    """

    def __init__(
        self,
        backend: Backend,
        model: ModelInfo,
        labels: VersionLabels,
        slots: int,
        notify: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._backend = backend
        self._model = model
        self._labels = labels
        self._slots = slots
        self._places = slots + -(-slots // _SLOTS_PER_SPARE)
        self._notify = notify
        self._fail = fail
        self._line = WaitingQueue()
        self._responses: dict[str, RequestState] = {}
        self._running: dict[str, Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._readers: set[asyncio.Task[None]] = set()
        self._unread = 0
        self._ended: list[RequestState] = []
        self._streamed: dict[int, RequestState] = {}
        self._given_up: list[str] = []
        self._job_ids = itertools.count()
        self._interrupting = False
        self._trial: RequestState | None = None
        self.tokens_generated = self.tokens_outside = 0
        self.pinned = 0

    @property
    def active(self) -> int:
        """Responses that are being decoded, as far as can be told from here."""
        return min(self._slots, max(0, len(self._responses) - len(self._line) - self._unread))

    @property
    def on_trial(self) -> str:
        """Id of the request that has started alone and has no token yet; empty where none has."""
        trial = self._trial
        waits = trial is not None and trial.job_id is not None and not trial.begun
        return trial.request.request_id if trial is not None and waits else ""

    @property
    def in_flight(self) -> int:
        """Responses that have a token of their own and go on."""
        return sum(response.begun for response in self._responses.values())

    # --- requests ---

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Puts requests in the line, once their images are read; what has nothing to be sampled ends here."""
        pictured = []
        for request in requests:
            response = RequestState(request, self._model)
            self._responses[request.request_id] = response
            self.pinned += request.pinned
            if request.images:
                pictured.append(response)
            else:
                self._enter(response)
        if pictured and self._model.images is not None:
            self._unread += len(pictured)
            reading = asyncio.get_running_loop().create_task(self._read(pictured, self._model.images))
            self._readers.add(reading)
            reading.add_done_callback(self._task_ended)
        self._notify()

    def _enter(self, response: RequestState) -> None:
        reason = response.complete()
        if reason is None:
            self._line.add([response])
        else:
            self._end(response, reason)

    async def _read(self, responses: Sequence[RequestState], images: ImageProcessor) -> None:
        """Has images looked at in a thread; what they make of their prompts must fit the model."""
        requests = [response.request for response in responses]
        found = await asyncio.to_thread(expand_images, requests, images, self._model.limits)
        self._unread -= len(responses)
        for response, seen in zip(responses, found, strict=True):
            if response.finish is not None:
                continue
            if isinstance(seen, PayloadError):
                self._refuse(response, str(seen))
            else:
                response.prompt_tokens = len(seen.prompt_ids)
                self._enter(response)
        self._notify()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends responses with the tokens so far; unknown ids are passed over."""
        found = [self._responses[name] for name in dict.fromkeys(request_ids) if name in self._responses]
        self._line.withdraw([response for response in found if response.job_id is None])
        for response in found:
            if response.job_id is not None:
                self._give_up(response.job_id)
            self._end(response, "aborted")

    def abort_all(self) -> None:
        """Ends everything."""
        self.abort(list(self._responses))

    def abort_pinned(self) -> None:
        """Ends all pinned ones."""
        self.abort([name for name, response in self._responses.items() if response.request.pinned])

    def progress(self, at_least: Mapping[str, int]) -> list[PartialResponse]:
        """Copies of the responses that have begun and have as many tokens as `at_least` says."""
        now = time.monotonic()
        found = []
        for name, wanted in at_least.items():
            response = self._responses.get(name)
            if response is not None and response.begun and len(response.ids) >= wanted:
                found.append(response.partial(now))
        return found

    # --- turns ---

    def refill(self, *, pinned_only: bool) -> None:
        """Gives the backend as many jobs as it may have."""
        while len(self._running) < self._places and not self.on_trial:
            response = self._line.next(pinned_only=pinned_only)
            if response is None:
                return
            if response.request.alone:
                self._trial = response
            job = response.next_job(f"job-{next(self._job_ids)}")
            running = self._running[job.job_id] = Running(job.job_id, response)
            self._spawn(self._generate(job, running))

    def collect(self) -> tuple[list[TokenEvent], list[GenerationResult]]:
        """What was streamed and what has ended since the last call; tells the backend of jobs that were given up."""
        if self._given_up:
            self._spawn(self._backend.abort(self._given_up))
            self._given_up = []
        events = [event for response in self._streamed.values() if (event := response.event()) is not None]
        self._streamed.clear()
        results = [response.result() for response in self._ended]
        self._ended = []
        return events, results

    async def interrupt(self) -> None:
        """Ends all jobs; responses that have not ended thereby stand at the head of the line, in order of their start.

        Raises:
            EngineError: the backend does not end them.
        """
        stopped = [running for running in self._running.values() if running.response is not None]
        self._interrupting = True
        try:
            if stopped:
                await self._backend.abort([running.job_id for running in stopped])
            if self._tasks:
                _, late = await asyncio.wait(self._tasks, timeout=_ABORT_S)
                if late:
                    raise EngineError(f"{len(late)} jobs did not end within {_ABORT_S:g} s of being aborted")
        finally:
            self._interrupting = False
        going_on = [running.response for running in stopped]
        self._line.put_back([response for response in going_on if response is not None and response.finish is None])

    async def close(self, timeout_s: float) -> None:
        """Cancels all jobs and waits for their end."""
        tasks = self._tasks | self._readers
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    # --- jobs ---

    async def _generate(self, job: DecodeJob, running: Running) -> None:
        try:
            await self._backend.generate(job, partial(self._take, running))
        except (PayloadError, RequestError) as error:
            self._failed_at(running, error)
        if running.job_id in self._running:
            raise EngineError(f"{running.job_id} ended without saying why")

    def _failed_at(self, running: Running, error: PayloadError | RequestError) -> None:
        """The engine does not take a job, or failed at it alone: its response is refused, or tried once more."""
        self._running.pop(running.job_id, None)
        self._notify()
        response = running.response
        if response is None or response.finish is not None:
            return
        # Who asked is told in the end, and has one line for all members of a group.
        log.debug("the engine does not answer request %s: %s", response.request.request_id, error)
        response.job_id = None
        response.failures += 1
        if isinstance(error, PayloadError):
            self._refuse(response, str(error))
        elif response.failures == REQUEST_ATTEMPTS:
            raised = self._backend.last_error()
            self._refuse(response, f"{error}; the last error in its log: {raised}" if raised else str(error))
        elif (reason := response.complete()) is not None:
            self._end(response, reason)
        elif not self._interrupting:
            # An interruption puts it back with all others.
            self._line.put_back([response])

    def _refuse(self, response: RequestState, reason: str) -> None:
        response.refusal = reason
        self._end(response, "aborted")

    def _take(self, running: Running, chunk: DecodeChunk) -> None:
        response = running.response
        if response is None:
            if chunk.finish is not None:
                self._running.pop(running.job_id, None)
                self._notify()
            return
        try:
            tokens = response.add(chunk, self._labels)
        except EngineError as error:
            self._fail(error)
            return
        self.tokens_generated += tokens
        self.tokens_outside += tokens if response.request.outside else 0
        if response is self._trial:
            # The next may start.
            self._trial = None
            self._notify()
        if response.request.stream:
            self._streamed[id(response)] = response
            self._notify()
        reason = response.finish
        if chunk.finish is not None:
            self._running.pop(running.job_id, None)
            response.job_id = None
            reason = reason or chunk.finish
            if reason == "aborted" and self._interrupting:
                # It keeps its tokens; none is missing to it where the job had just sampled its last.
                reason = response.complete()
        elif reason is not None:
            self._give_up(running.job_id)
        if reason is not None:
            self._end(response, reason)

    def _give_up(self, job_id: str) -> None:
        self._running[job_id].response = None
        self._given_up.append(job_id)

    def _end(self, response: RequestState, reason: FinishReason) -> None:
        response.finish, response.job_id = reason, None
        del self._responses[response.request.request_id]
        self.pinned -= response.request.pinned
        self._ended.append(response)
        self._notify()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._readers.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
