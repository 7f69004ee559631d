"""Observes responses while weights change: every token's time and version, checked as it comes."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from benchmarks.engines.worker_process import MeasurementError
from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.interface import EngineListener
from rollmesh.generators.engines.types import GenerationRequest, GenerationResult, TokenEvent
from rollmesh.mesh.trajectory.versions import PolicyVersion


@dataclass(slots=True)
class Watched:
    """One response, which may take several attempts.

    Attributes:
        request: its first attempt.
        attempt: number of the present one.
        begun: when the first token of all attempts came.
        last: when its last token came; None before.
        version: of that token.
        tokens: of the present attempt.
    """

    request: GenerationRequest
    attempt: int = 0
    begun: float = 0.0
    last: float | None = None
    version: PolicyVersion | None = None
    tokens: int = 0

    @property
    def name(self) -> str:
        """Id of the present attempt's request."""
        return f"{self.request.request_id}.{self.attempt}"


@dataclass
class Observations:
    """Observations of one pass; seconds.

    Attributes:
        gaps, swap_gaps: from a token of a response to its next one, without and with new weights between.
        durations: of finished responses, from their first token on.
        finished, tokens: responses, and tokens in them.
        crossed: responses with tokens on both sides of a swap.
        before, after: their tokens before and after the first swap that they lived through.
        most_versions: in one response.
        discarded: tokens of attempts that were thrown away.
        repeated: tokens, prompts included, of sequences in flight at swaps.
    """

    gaps: list[float] = field(default_factory=list)
    swap_gaps: list[float] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)
    finished: int = 0
    tokens: int = 0
    crossed: int = 0
    before: int = 0
    after: int = 0
    most_versions: int = 0
    discarded: int = 0
    repeated: int = 0


class Watcher(EngineListener):
    """Takes what the engine says; a response that is not what it should be ends the measurement.

    Attributes:
        seen: of the present pass.
        open: responses that have not finished, by id.
    """

    def __init__(self) -> None:
        self.seen = Observations()
        self.open: dict[str, Watched] = {}
        self._failure: Exception | None = None
        self._changed = threading.Condition()

    def begin(self, requests: list[GenerationRequest]) -> None:
        """These will be submitted."""
        with self._changed:
            self.open |= {request.request_id: Watched(request) for request in requests}

    def wait_below(self, responses: int, timeout_s: float) -> bool:
        """Waits until fewer than the given number are open; whether it came to that.

        Raises:
            Exception: what went wrong.
        """
        with self._changed:
            came = self._changed.wait_for(
                lambda: self._failure is not None or len(self.open) < responses, max(0.0, timeout_s)
            )
            if self._failure is not None:
                raise self._failure
            return came

    def in_flight(self) -> list[Watched]:
        """Responses that are open; a copy."""
        with self._changed:
            return list(self.open.values())

    def on_tokens(self, events: list[TokenEvent]) -> None:
        now = time.perf_counter()
        with self._changed:
            for event in events:
                watched = self.open.get(event.request_id.rpartition(".")[0])
                if watched is None:
                    self._fail(f"tokens of {event.request_id}, which is over")
                    return
                runs = event.sampled.versions.runs
                if watched.last is None:
                    watched.begun = now
                else:
                    same = len(runs) == 1 and runs[0][1] == watched.version
                    (self.seen.gaps if same else self.seen.swap_gaps).append(now - watched.last)
                watched.last, watched.version = now, runs[-1][1]
                watched.tokens += len(event.sampled)

    def on_results(self, results: list[GenerationResult]) -> None:
        with self._changed:
            for result in results:
                self._add_result(result)
            self._changed.notify_all()

    def on_failure(self, error: EngineError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def swapped(self) -> None:
        """Weights were changed: what is in flight may have to be prefilled again."""
        with self._changed:
            self.seen.repeated += sum(
                len(watched.request.prompt_ids) + watched.tokens for watched in self.open.values() if watched.tokens
            )

    def _add_result(self, result: GenerationResult) -> None:
        name, _, attempt = result.request_id.rpartition(".")
        watched = self.open.get(name)
        if watched is None or watched.attempt != int(attempt):
            self._fail(f"a result of {result.request_id}, which is over")
            return
        runs, count = result.sampled.versions.runs, len(result.sampled.response_ids)
        versions = [version for _, version in runs]
        if sum(length for length, _ in runs) != count or sorted(set(versions)) != versions or watched.tokens != count:
            self._fail(f"{result.request_id}: {count} tokens, {watched.tokens} streamed, versions {runs}")
            return
        if result.finish_reason == "aborted":
            self.seen.discarded += count
            watched.attempt += 1
            watched.tokens = 0
            return
        if count != watched.request.sampling.max_tokens:
            self._fail(f"{result.request_id} has {count} tokens: {result.finish_reason}")
            return
        seen = self.seen
        seen.finished += 1
        seen.tokens += count
        seen.durations.append(time.perf_counter() - watched.begun)
        seen.most_versions = max(seen.most_versions, len(runs))
        if len(runs) > 1:
            seen.crossed += 1
            seen.before += runs[0][0]
            seen.after += count - runs[0][0]
        del self.open[name]

    def _fail(self, what: str) -> None:
        self._failure = self._failure or MeasurementError(what)
        self._changed.notify_all()
