"""From the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from rollmesh.generators.engines.interface import EngineError, EngineListener, GenerationResult, TokenEvent
from rollmesh.mesh.errors import RollmeshError

log = logging.getLogger(__name__)


class EngineEventBridge(EngineListener):
    """Carries what the engine's thread says to the event loop: one wake-up per decode step that has something to say.

    Args:
        on_failure: told, in the event loop's thread, what ended the engine.
    """

    def __init__(self, on_failure: Callable[[RollmeshError], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._take: Callable[[list[GenerationResult]], None] = _nobody
        self._take_tokens: Callable[[list[TokenEvent]], None] = _nobody
        self._take_failure = on_failure

    def connect(
        self,
        take: Callable[[list[GenerationResult]], None],
        take_tokens: Callable[[list[TokenEvent]], None] | None = None,
    ) -> None:
        """Names who takes results, and tokens of streamed requests, in the event loop's thread."""
        self._take = take
        self._take_tokens = take_tokens or self._take_tokens

    def disconnect(self) -> None:
        """What comes from here on is no one's."""
        self._take = self._take_tokens = _drop

    def on_results(self, results: list[GenerationResult]) -> None:
        """For the engine."""
        self._loop.call_soon_threadsafe(self._deliver, results)

    def on_tokens(self, events: list[TokenEvent]) -> None:
        """For the engine."""
        self._loop.call_soon_threadsafe(self._deliver_tokens, events)

    def on_failure(self, error: EngineError) -> None:
        """For the engine."""
        self._loop.call_soon_threadsafe(self._take_failure, error)

    def _deliver(self, results: list[GenerationResult]) -> None:
        self._take(results)

    def _deliver_tokens(self, events: list[TokenEvent]) -> None:
        self._take_tokens(events)


def _nobody(what: Sequence[object]) -> None:
    raise AssertionError(f"{len(what)} results or events that nobody has asked for")


def _drop(what: Sequence[object]) -> None:
    log.debug("%d results or events came after the end", len(what))
