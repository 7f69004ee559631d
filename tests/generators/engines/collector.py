"""Collects results and events of an engine, for tests that wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.interface import EngineListener
from rollmesh.generators.engines.types import GenerationResult, TokenEvent

DEADLINE_S = 240.0


class Collector(EngineListener):
    """Keeps results, events and failure.

    Args:
        deadline_s: for any one thing to arrive.

    Attributes:
        results: by request.
        events: in the order of their arrival.
        streamed: request -> tokens of its events.
        streamed_at_end: the same, as it was when its result arrived.
        failure: what ended the engine.
        hook: sees every batch of results first, in the engine's thread.
    """

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self.results: dict[str, GenerationResult] = {}
        self.events: list[TokenEvent] = []
        self.streamed: dict[str, int] = {}
        self.streamed_at_end: dict[str, int] = {}
        self.failure: EngineError | None = None
        self.hook: Callable[[list[GenerationResult]], None] | None = None
        self._deadline_s = deadline_s
        self._reactions: list[tuple[Mapping[str, int], Callable[[], object]]] = []
        self._changed = threading.Condition()

    # --- for the engine ---

    def on_results(self, results: list[GenerationResult]) -> None:
        if self.hook is not None:
            self.hook(results)
        with self._changed:
            for result in results:
                assert result.request_id not in self.results, "a request ended twice"
                self.results[result.request_id] = result
                self.streamed_at_end[result.request_id] = self.streamed.get(result.request_id, 0)
            self._changed.notify_all()

    def on_tokens(self, events: list[TokenEvent]) -> None:
        with self._changed:
            for event in events:
                assert len(event.sampled), "an event without tokens"
                assert event.request_id not in self.results, "an event behind its result"
                self.events.append(event)
                self.streamed[event.request_id] = self.streamed.get(event.request_id, 0) + len(event.sampled)
            due = [reaction for reaction in self._reactions if self._has(reaction[0])]
            self._reactions = [reaction for reaction in self._reactions if reaction not in due]
            self._changed.notify_all()
        for _, react in due:
            react()

    def on_failure(self, error: EngineError) -> None:
        with self._changed:
            self.failure = error
            self._changed.notify_all()

    # --- for tests ---

    def when_streamed(self, tokens: Mapping[str, int], react: Callable[[], object]) -> None:
        """Calls `react`, which must not wait, in the engine's thread once requests have streamed so many tokens."""
        with self._changed:
            self._reactions.append((tokens, react))

    def wait_streamed(self, tokens: Mapping[str, int]) -> None:
        """Waits until requests have streamed so many tokens each."""
        self._wait(lambda: self._has(tokens), f"tokens {tokens}")
        ended = {name: self.results[name] for name in self.results.keys() & tokens.keys()}
        found = {name: (result.finish_reason, len(result.sampled.response_ids)) for name, result in ended.items()}
        assert not ended, f"ended before that: {found}"

    def wait(self, request_ids: Sequence[str]) -> list[GenerationResult]:
        """The results of these requests, in this order."""
        self._wait(lambda: all(name in self.results for name in request_ids), "results")
        return [self.results[name] for name in request_ids]

    def wait_more(self, count: int) -> int:
        """Waits until there are more than `count` results; how many there are."""
        self._wait(lambda: len(self.results) > count, "further results")
        return len(self.results)

    def wait_failure(self) -> EngineError:
        """The engine's failure."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.failure is not None, self._deadline_s)
            assert self.failure is not None
            return self.failure

    def _has(self, tokens: Mapping[str, int]) -> bool:
        return all(self.streamed.get(name, 0) >= count for name, count in tokens.items())

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        with self._changed:
            arrived = self._changed.wait_for(lambda: self.failure is not None or done(), self._deadline_s)
            assert self.failure is None, self.failure
            assert arrived, f"{what} did not arrive in time"
