"""One turn of decoding: room is made, requests start, a step is made; and what becomes of them where that fails.

Invariants: whatever a forward pass raises, each request stays with the line or with the decoder, or ends refused; who
is refused has failed alone, `REQUEST_ATTEMPTS` times, and a harmless pass went well after it. Where that one fails too
it is the engine that has failed. What has no room stands in the line again, with its tokens: the last to start first.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from rollmesh.generators.engines.hf.decoder import Decoder, Step
from rollmesh.generators.engines.hf.failure_isolation import Caution, out_of_memory
from rollmesh.generators.engines.hf.waiting_queue import Prompt, WaitingQueue, WaitingRequest, unsampled
from rollmesh.generators.engines.interface import REQUEST_ATTEMPTS, EngineError, GenerationResult
from rollmesh.mesh.errors import PayloadError

log = logging.getLogger(__name__)


class Stepper:
    """Decodes for one engine, in its thread.

    Args:
        decoder: has the running sequences.
        line: has the waiting ones.

    Attributes:
        preemptions: sequences that lost their keys and values for want of room.
    """

    def __init__(self, decoder: Decoder, line: WaitingQueue) -> None:
        self._decoder = decoder
        self._line = line
        self._caution = Caution()
        self.preemptions = 0

    def turn(self, *, pinned_only: bool) -> Step:
        """Starts what may start, and draws one token for every sequence; a turn that fails draws none.

        Raises:
            EngineError: the model fails at anything.
        """
        decoder, caution = self._decoder, self._caution
        self._preempt(decoder.surplus())
        table = decoder.table
        starting = self._line.pop_waiting(
            caution.most(table.active, table.free), pinned_only=pinned_only, fits=decoder.fits
        )
        if not starting and not table.active:
            return Step()
        names = [waiting.request.request_id for waiting in starting]
        caution.enters(names)
        prompts = self._line.to_prefill(starting, ahead=not caution.one_at_a_time)
        try:
            if prompts:
                decoder.prefill(prompts)
        except Exception as error:  # noqa: BLE001 - the model's own code may raise anything
            self._line.put_back(starting)
            return Step(results=self._prefill_failed(starting, prompts, error))
        try:
            decoder.reserve(starting)
        except (RuntimeError, MemoryError) as error:
            self._line.put_back(starting)
            return Step(results=self._reserve_failed(starting, error))
        try:
            step = decoder.step(starting)
        except Exception as error:  # noqa: BLE001 - as above
            self._line.put_back(starting)
            return Step(results=self._step_failed(starting, error))
        caution.passed(names, [result.request_id for result in step.results])
        if caution.suspect is not None:
            self._try_alone(caution.suspect)
        return step

    def gone(self, request_ids: Collection[str]) -> None:
        """These requests have ended."""
        self._caution.gone(request_ids)

    def _preempt(self, last: int) -> None:
        if last:
            self.preemptions += len(self._stopped(last))

    # --- failures ---

    def _prefill_failed(
        self, starting: Sequence[WaitingRequest], prompts: Sequence[Prompt], error: Exception
    ) -> list[GenerationResult]:
        """Nothing that runs is concerned."""
        active = self._decoder.table.active
        if len(prompts) > 1:
            log.warning("a prefill of %d prompts failed, they go one at a time: %s", len(prompts), error)
            self._caution.separate(len(starting))
            return []
        if out_of_memory(error) and active:
            log.warning("no memory for a prefill besides %d sequences: it waits until half have ended", active)
            self._line.drop_prefixes()
            self._caution.wait_for_room(active // 2)
            return []
        # Of the others the prompts are there already.
        return self._blame(next(waiting for waiting in starting if waiting.prompt is prompts[0]), error)

    def _reserve_failed(self, starting: Sequence[WaitingRequest], error: Exception) -> list[GenerationResult]:
        """Keys and values are lost; fewer sequences go in again."""
        stopped = self._stopped(self._decoder.table.active)
        self.preemptions += len(stopped)
        self._line.drop_prefixes()
        if len(stopped) + len(starting) == 1:
            return self._blame([*stopped, *starting][0], error)
        log.warning("no memory for %d sequences, fewer are decoded: %s", len(stopped) + len(starting), error)
        return []

    def _step_failed(self, starting: Sequence[WaitingRequest], error: Exception) -> list[GenerationResult]:
        """What was starting stands in the line again; what runs has lost no token."""
        active, entering = self._decoder.table.active, self._caution.entering
        if active + len(starting) == 1:
            return self._blame([*self._stopped(active), *starting][0], error)
        if out_of_memory(error) and active:
            keep = active if starting else active // 2
            log.warning("no memory for a step: %d of %d sequences continue, the others wait: %s", keep, active, error)
            self.preemptions += len(self._stopped(active - keep))
            self._line.drop_prefixes()
            self._caution.wait_for_room(keep - 1)
            return []
        if entering is not None:
            if not starting:
                self._line.put_back(self._decoder.stop([entering]))
            self._caution.suspects()
            return []
        stopped = self._stopped(active - active // 2)
        log.warning("a step failed, %d sequences go in again one at a time: %s", len(stopped) + len(starting), error)
        self._caution.separate(len(stopped) + len(starting))
        return []

    def _try_alone(self, suspect: str) -> None:
        """The others have decoded without it: they make way, so that the next step is its own."""
        stopped = self._stopped(self._decoder.table.active)
        self._line.put_back(self._line.withdraw({suspect}))
        self._caution.separate(len(stopped))

    def _stopped(self, last: int) -> list[WaitingRequest]:
        """The last to start stand at the head of the line."""
        stopped = self._decoder.interrupt(last)
        self._line.put_back(stopped)
        return stopped

    def _blame(self, culprit: WaitingRequest, error: Exception) -> list[GenerationResult]:
        """It stands at the head of the line; it goes in again, or it is refused with all that share its prompt."""
        name = culprit.request.request_id
        refused = isinstance(error, PayloadError) or self._caution.blame(name)
        # Who asked is told in the end, and has one line for all members of a group.
        log.debug("request %s fails%s: %s", name, "" if refused else ", it is tried again", error)
        if not refused:
            return []
        why = str(error) if isinstance(error, PayloadError) else self._why(error)
        names = {name} if culprit.request.prefix is not None else self._line.sharing(culprit.prompt)
        self._line.drop_prefixes()
        return [unsampled(waiting.request, "aborted", why) for waiting in self._line.withdraw(names)]

    def _why(self, error: Exception) -> str:
        try:
            self._decoder.check()
        except Exception as broken:  # the model's own code may raise anything
            raise EngineError(f"the model fails at anything: {type(broken).__name__}: {broken}") from broken
        said = f"{type(error).__name__}: {error}"
        if out_of_memory(error):
            return f"no memory for it, alone as it runs: {said}"
        return f"the model failed at it {REQUEST_ATTEMPTS} times: {said}"
