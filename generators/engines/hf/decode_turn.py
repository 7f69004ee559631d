"""One turn of decoding: room is made, requests start, a step is made; and the requests' fate where that fails.

Invariants: whatever a forward pass raises, each request stays in the queue or with the decoder, or ends refused. A
refused request has failed alone, `REQUEST_ATTEMPTS` times, and a harmless pass succeeded after it. Where that one
fails too the engine has failed. A sequence without room returns to the queue, with its tokens: the last to start first.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.hf.decoder import Decoder, Step
from rollmesh.generators.engines.hf.failure_isolation import FailureIsolation, out_of_memory
from rollmesh.generators.engines.hf.waiting_queue import SharedPrompt, WaitingQueue, WaitingRequest, unsampled
from rollmesh.generators.engines.types import REQUEST_ATTEMPTS, GenerationResult
from rollmesh.mesh.errors import PayloadError

log = logging.getLogger(__name__)


class Stepper:
    """Decodes for one engine, in its thread.

    Args:
        decoder: has the running sequences.
        waiting: the queue of the others.

    Attributes:
        preemptions: sequences that lost their keys and values for lack of memory.
    """

    def __init__(self, decoder: Decoder, waiting: WaitingQueue) -> None:
        self._decoder = decoder
        self._waiting = waiting
        self._isolation = FailureIsolation()
        self.preemptions = 0

    def turn(self, *, pinned_only: bool) -> Step:
        """Starts requests and draws one token for every sequence; a turn that fails draws none.

        Raises:
            EngineError: the model fails at anything.
        """
        decoder, isolation = self._decoder, self._isolation
        self._preempt(decoder.surplus())
        table = decoder.table
        starting = self._waiting.pop_waiting(
            isolation.start_limit(table.active, table.free), pinned_only=pinned_only, fits=decoder.fits
        )
        if not starting and not table.active:
            return Step()
        names = [waiting.request.request_id for waiting in starting]
        isolation.record_start(names)
        prompts = self._waiting.to_prefill(starting, ahead=not isolation.one_at_a_time)
        try:
            if prompts:
                decoder.prefill(prompts)
        except Exception as error:  # noqa: BLE001 - the model's own code may raise anything
            self._waiting.put_back(starting)
            return Step(results=self._prefill_failed(starting, prompts, error))
        try:
            decoder.reserve(starting)
        except (RuntimeError, MemoryError) as error:
            self._waiting.put_back(starting)
            return Step(results=self._reserve_failed(starting, error))
        try:
            step = decoder.step(starting)
        except Exception as error:  # noqa: BLE001 - as above
            self._waiting.put_back(starting)
            return Step(results=self._step_failed(starting, error))
        isolation.record_success(names, [result.request_id for result in step.results])
        if isolation.suspect is not None:
            self._try_alone(isolation.suspect)
        return step

    def forget(self, request_ids: Collection[str]) -> None:
        """Forgets requests that have ended."""
        self._isolation.forget(request_ids)

    def _preempt(self, last: int) -> None:
        if last:
            self.preemptions += len(self._interrupt(last))

    # --- failures ---

    def _prefill_failed(
        self, starting: Sequence[WaitingRequest], prompts: Sequence[SharedPrompt], error: Exception
    ) -> list[GenerationResult]:
        """Handles a failed prefill, which leaves running sequences as they are."""
        active = self._decoder.table.active
        if len(prompts) > 1:
            log.warning("a prefill of %d prompts failed, they go one at a time: %s", len(prompts), error)
            self._isolation.isolate(len(starting))
            return []
        if out_of_memory(error) and active:
            log.warning("no memory for a prefill next to %d sequences: it waits until half have ended", active)
            self._waiting.drop_prefixes()
            self._isolation.wait_for_room(active // 2)
            return []
        # The prompts of the others are there already.
        return self._blame(next(waiting for waiting in starting if waiting.prompt is prompts[0]), error)

    def _reserve_failed(self, starting: Sequence[WaitingRequest], error: Exception) -> list[GenerationResult]:
        """Handles lost keys and values; fewer sequences start again."""
        stopped = self._interrupt(self._decoder.table.active)
        self.preemptions += len(stopped)
        self._waiting.drop_prefixes()
        if len(stopped) + len(starting) == 1:
            return self._blame([*stopped, *starting][0], error)
        log.warning("no memory for %d sequences, fewer are decoded: %s", len(stopped) + len(starting), error)
        return []

    def _step_failed(self, starting: Sequence[WaitingRequest], error: Exception) -> list[GenerationResult]:
        """Handles a failed step: requests that were starting are queued again; running ones have lost no token."""
        active, entering = self._decoder.table.active, self._isolation.entering
        if active + len(starting) == 1:
            return self._blame([*self._interrupt(active), *starting][0], error)
        if out_of_memory(error) and active:
            keep = active if starting else active // 2
            log.warning("no memory for a step: %d of %d sequences continue, the others wait: %s", keep, active, error)
            self.preemptions += len(self._interrupt(active - keep))
            self._waiting.drop_prefixes()
            self._isolation.wait_for_room(keep - 1)
            return []
        if entering is not None:
            if not starting:
                self._waiting.put_back(self._decoder.interrupt_requests([entering]))
            self._isolation.suspect_entering()
            return []
        stopped = self._interrupt(active - active // 2)
        log.warning("a step failed, %d sequences go in again one at a time: %s", len(stopped) + len(starting), error)
        self._isolation.isolate(len(stopped) + len(starting))
        return []

    def _try_alone(self, suspect: str) -> None:
        """Interrupts the others, which have decoded without the suspect, so that the next step is its own."""
        stopped = self._interrupt(self._decoder.table.active)
        self._waiting.put_back(self._waiting.remove({suspect}))
        self._isolation.isolate(len(stopped))

    def _interrupt(self, last: int) -> list[WaitingRequest]:
        """Interrupts the sequences that started last and puts them at the head of the queue."""
        stopped = self._decoder.interrupt(last)
        self._waiting.put_back(stopped)
        return stopped

    def _blame(self, culprit: WaitingRequest, error: Exception) -> list[GenerationResult]:
        """Blames the head of the queue: it starts again, or is refused with all that share its prompt.

        With a prefix or a grammar, which may be the cause, it is refused alone.
        """
        name = culprit.request.request_id
        refused = isinstance(error, PayloadError) or self._isolation.blame(name)
        # The requester gets the reason in the end, and logs one line for all members of a group.
        log.debug("request %s fails%s: %s", name, "" if refused else ", it is tried again", error)
        if not refused:
            return []
        why = str(error) if isinstance(error, PayloadError) else self._refusal(error)
        alone = culprit.request.prefix is not None or culprit.request.sampling.grammar
        names = {name} if alone else self._waiting.sharing(culprit.prompt)
        self._waiting.drop_prefixes()
        return [unsampled(waiting.request, "aborted", why) for waiting in self._waiting.remove(names)]

    def _refusal(self, error: Exception) -> str:
        try:
            self._decoder.check()
        except Exception as broken:  # the model's own code may raise anything
            raise EngineError(f"the model fails at every request: {type(broken).__name__}: {broken}") from broken
        message = f"{type(error).__name__}: {error}"
        if out_of_memory(error):
            return f"no memory for it, alone as it runs: {message}"
        return f"the model failed at it {REQUEST_ATTEMPTS} times: {message}"
