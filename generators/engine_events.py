"""The bridge from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.interface import EngineListener
from rollmesh.generators.engines.types import GenerationResult, TokenEvent
from rollmesh.mesh.errors import RollmeshError

log = logging.getLogger(__name__)


class EngineEventBridge(EngineListener):
    """Carries results and events of the engine's thread to the event loop: one wake-up per decode step that has any.

    Args:
        on_failure: called, in the event loop's thread, with the error that ended the engine.
    """

    def __init__(self, on_failure: Callable[[RollmeshError], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._handle_results: Callable[[list[GenerationResult]], None] = _unexpected
        self._handle_tokens: Callable[[list[TokenEvent]], None] = _unexpected
        self._handle_failure = on_failure

    def connect(
        self,
        on_results: Callable[[list[GenerationResult]], None],
        on_tokens: Callable[[list[TokenEvent]], None] | None = None,
    ) -> None:
        """Sets the callbacks for results and for tokens of streamed requests, which run in the event loop's thread."""
        self._handle_results = on_results
        self._handle_tokens = on_tokens or self._handle_tokens

    def disconnect(self) -> None:
        """Drops everything that comes from here on."""
        self._handle_results = self._handle_tokens = _drop

    def on_results(self, results: list[GenerationResult]) -> None:
        """Passes results on; called by the engine."""
        self._loop.call_soon_threadsafe(self._deliver, results)

    def on_tokens(self, events: list[TokenEvent]) -> None:
        """Passes tokens on; called by the engine."""
        self._loop.call_soon_threadsafe(self._deliver_tokens, events)

    def on_failure(self, error: EngineError) -> None:
        """Passes the failure on; called by the engine."""
        self._loop.call_soon_threadsafe(self._handle_failure, error)

    def _deliver(self, results: list[GenerationResult]) -> None:
        self._handle_results(results)

    def _deliver_tokens(self, events: list[TokenEvent]) -> None:
        self._handle_tokens(events)


def _unexpected(items: Sequence[object]) -> None:
    raise AssertionError(f"{len(items)} results or events without a receiver")


def _drop(items: Sequence[object]) -> None:
    log.debug("%d results or events came after the end", len(items))
