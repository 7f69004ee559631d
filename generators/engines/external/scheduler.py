"""Schedules responses as jobs of the backend and collects their tokens. In the engine's event loop alone.

Invariants:

- Every response has its images read, waits in the queue, or has exactly one job with tokens that count. An abandoned
  job (its response has ended) counts as running until the backend ends it; its tokens are ignored.
- The backend has at most `slots` jobs and one more for every eight slots. These wait in its own queue: it refills a
  slot in the very step in which one becomes free. Their places are filled again in the same turn of the event loop.
  All others wait here, where order, pinning and aborts are ours.
- While a request that starts alone has a job and no token yet nothing else starts: an engine that ends, ends at that.
- Results and streamed tokens are collected once per turn of the event loop, all of them together.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from rollmesh.generators.engines.errors import EngineError, RequestError
from rollmesh.generators.engines.external.backend import Backend, DecodeChunk, DecodeJob
from rollmesh.generators.engines.external.model_info import ModelInfo
from rollmesh.generators.engines.external.request_state import RequestState
from rollmesh.generators.engines.external.version_labels import VersionLabels
from rollmesh.generators.engines.external.waiting_queue import WaitingQueue
from rollmesh.generators.engines.request_validation import expand_images
from rollmesh.generators.engines.types import (
    REQUEST_ATTEMPTS,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    PartialResponse,
    TokenEvent,
)
from rollmesh.mesh.errors import PayloadError
from rollmesh.mesh.runtime.background_tasks import BackgroundTasks
from rollmesh.mesh.trajectory.images import ImageProcessor

log = logging.getLogger(__name__)

# Slots for each of which the backend gets one job more than it can decode.
_SLOTS_PER_SPARE = 8
# Seconds that a backend gets to end aborted jobs; one that hangs is found before (`engine_watch`).
_ABORT_S = 600.0


@dataclass(slots=True, eq=False)
class RunningJob:
    """A job that the backend has; its response is None where the job was abandoned."""

    job_id: str
    response: RequestState | None


class RequestScheduler:
    """The responses of one engine and their jobs.

    Args:
        backend: runs the jobs.
        model: that it runs.
        labels: of the weights it was given.
        slots: sequences that it decodes together.
        notify: schedules a turn: something has ended, was streamed, or may start.
        fail: ends the engine.

    Attributes:
        tokens_generated: tokens sampled.
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
        self._max_jobs = slots + -(-slots // _SLOTS_PER_SPARE)
        self._notify = notify
        self._fail = fail
        self._waiting = WaitingQueue()
        self._responses: dict[str, RequestState] = {}
        self._running: dict[str, RunningJob] = {}
        self._tasks = BackgroundTasks(self._on_task_error)
        self._readers = BackgroundTasks(self._on_task_error)
        self._unread = 0
        self._ended: list[RequestState] = []
        self._streamed: dict[int, RequestState] = {}
        self._abandoned: list[str] = []
        self._job_ids = itertools.count()
        self._interrupting = False
        self._trial: RequestState | None = None
        self.tokens_generated = self.tokens_outside = 0
        self.pinned = 0

    @property
    def active(self) -> int:
        """Responses that are being decoded, as far as is known here."""
        return min(self._slots, max(0, len(self._responses) - len(self._waiting) - self._unread))

    @property
    def trial_id(self) -> str:
        """Id of the request that has started alone and has no token yet; empty where none has."""
        trial = self._trial
        waits = trial is not None and trial.job_id is not None and not trial.has_sampled
        return trial.request.request_id if trial is not None and waits else ""

    @property
    def in_flight(self) -> int:
        """Unfinished responses with a token that was sampled here."""
        return sum(response.has_sampled for response in self._responses.values())

    # --- requests ---

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        """Queues requests, once their images are read; a request with nothing left to sample ends here."""
        pictured = []
        for request in requests:
            response = RequestState(request, self._model)
            self._responses[request.request_id] = response
            self.pinned += request.pinned
            if request.images:
                pictured.append(response)
            else:
                self._enqueue(response)
        if pictured and self._model.images is not None:
            self._unread += len(pictured)
            self._readers.spawn(self._read(pictured, self._model.images))
        self._notify()

    def _enqueue(self, response: RequestState) -> None:
        reason = response.finish_reason()
        if reason is None:
            self._waiting.add([response])
        else:
            self._end(response, reason)

    async def _read(self, responses: Sequence[RequestState], images: ImageProcessor) -> None:
        """Reads images in a thread; the prompts with their image tokens must fit the model."""
        requests = [response.request for response in responses]
        expanded = await asyncio.to_thread(expand_images, requests, images, self._model.limits)
        self._unread -= len(responses)
        for response, outcome in zip(responses, expanded, strict=True):
            if response.finish is not None:
                continue
            if isinstance(outcome, PayloadError):
                self._refuse(response, str(outcome))
            else:
                response.prompt_tokens = len(outcome.prompt_ids)
                self._enqueue(response)
        self._notify()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends responses with the tokens so far; unknown ids are ignored."""
        responses = [self._responses[name] for name in dict.fromkeys(request_ids) if name in self._responses]
        self._waiting.remove([response for response in responses if response.job_id is None])
        for response in responses:
            if response.job_id is not None:
                self._abandon_job(response.job_id)
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
        copies = []
        for name, least in at_least.items():
            response = self._responses.get(name)
            if response is not None and response.has_sampled and len(response.ids) >= least:
                copies.append(response.partial(now))
        return copies

    # --- turns ---

    def refill(self, *, pinned_only: bool) -> None:
        """Gives the backend as many jobs as it may have."""
        while len(self._running) < self._max_jobs and not self.trial_id:
            response = self._waiting.pop_next(pinned_only=pinned_only)
            if response is None:
                return
            if response.request.alone:
                self._trial = response
            job = response.next_job(f"job-{next(self._job_ids)}")
            running = self._running[job.job_id] = RunningJob(job.job_id, response)
            self._tasks.spawn(self._generate(job, running))

    def collect(self) -> tuple[list[TokenEvent], list[GenerationResult]]:
        """Returns the events and results since the last call; aborts abandoned jobs at the backend."""
        if self._abandoned:
            self._tasks.spawn(self._backend.abort(self._abandoned))
            self._abandoned = []
        events = [event for response in self._streamed.values() if (event := response.event()) is not None]
        self._streamed.clear()
        results = [response.result() for response in self._ended]
        self._ended = []
        return events, results

    async def interrupt(self) -> None:
        """Ends all jobs; unfinished responses return to the head of the queue, in the order of their start.

        Raises:
            EngineError: the backend does not end them.
        """
        stopped = [running for running in self._running.values() if running.response is not None]
        self._interrupting = True
        try:
            if stopped:
                await self._backend.abort([running.job_id for running in stopped])
            if late := await self._tasks.drain(_ABORT_S):
                raise EngineError(f"{late} jobs did not end within {_ABORT_S:g} s of being aborted")
        finally:
            self._interrupting = False
        interrupted = [running.response for running in stopped]
        self._waiting.put_back(
            [response for response in interrupted if response is not None and response.finish is None]
        )

    async def close(self, timeout_s: float) -> None:
        """Cancels all jobs and waits for their end."""
        for tasks in (self._tasks, self._readers):
            tasks.cancel()
        await asyncio.gather(self._tasks.drain(timeout_s), self._readers.drain(timeout_s))

    # --- jobs ---

    async def _generate(self, job: DecodeJob, running: RunningJob) -> None:
        try:
            await self._backend.generate(job, partial(self._add_chunk, running))
        except (PayloadError, RequestError) as error:
            self._on_job_error(running, error)
        if running.job_id in self._running:
            raise EngineError(f"{running.job_id} ended without giving a reason")

    def _on_job_error(self, running: RunningJob, error: PayloadError | RequestError) -> None:
        """Refuses a response, or tries it once more: the engine does not take its job, or failed at it alone."""
        self._running.pop(running.job_id, None)
        self._notify()
        response = running.response
        if response is None or response.finish is not None:
            return
        # The requester gets the reason in the end, and logs one line for all members of a group.
        log.debug("the engine does not answer request %s: %s", response.request.request_id, error)
        response.job_id = None
        response.failures += 1
        if isinstance(error, PayloadError):
            self._refuse(response, str(error))
        elif response.failures == REQUEST_ATTEMPTS:
            raised = self._backend.last_error()
            self._refuse(response, f"{error}; the last error in its log: {raised}" if raised else str(error))
        elif (reason := response.finish_reason()) is not None:
            self._end(response, reason)
        elif not self._interrupting:
            # An interruption puts it back with all others.
            self._waiting.put_back([response])

    def _refuse(self, response: RequestState, reason: str) -> None:
        response.refusal = reason
        self._end(response, "aborted")

    def _add_chunk(self, running: RunningJob, chunk: DecodeChunk) -> None:
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
                reason = response.finish_reason()
        elif reason is not None:
            self._abandon_job(running.job_id)
        if reason is not None:
            self._end(response, reason)

    def _abandon_job(self, job_id: str) -> None:
        self._running[job_id].response = None
        self._abandoned.append(job_id)

    def _end(self, response: RequestState, reason: FinishReason) -> None:
        response.finish, response.job_id = reason, None
        del self._responses[response.request.request_id]
        self.pinned -= response.request.pinned
        self._ended.append(response)
        self._notify()

    def _on_task_error(self, _name: str, error: BaseException) -> None:
        self._fail(error)
