"""Polls the server's load metrics, at a modest interval; reports a foreign server that has gone silent."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.external.backend import LoadMetrics
from rollmesh.generators.engines.sglang.http_client import HttpClient

log = logging.getLogger(__name__)

_EVERY_S = 1.0
_ANSWER_S = 20.0
# Answers that may fail to come, one after the other, before a foreign server is taken for dead.
_FAILURES = 3


class LoadMonitor:
    """Polls one server.

    Args:
        client: to it.
        path: of its load metrics; empty where it has none: then only its liveness is polled.
        on_silence: called with the cause, once, when it does not answer any more; None: silence is judged elsewhere.

    Attributes:
        latest: the newest metrics known.
    """

    def __init__(self, client: HttpClient, path: str, on_silence: Callable[[str], None] | None) -> None:
        self._client = client
        self._path = path
        self._on_silence = on_silence
        self._task: asyncio.Task[None] | None = None
        self.latest = LoadMetrics(running=0, waiting=0, kv_usage=None, preemptions=0)

    def start(self) -> None:
        """Starts polling."""
        self._task = asyncio.create_task(self._poll())

    async def stop(self) -> None:
        """Ends it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _poll(self) -> None:
        failures = 0
        while True:
            try:
                self._update(await self._client.get(self._path or "/model_info", _ANSWER_S))
                failures = 0
            except EngineError as error:
                failures += 1
                log.warning("the SGLang server does not report its load (%d in a row): %s", failures, error)
                if failures == _FAILURES and self._on_silence is not None:
                    self._on_silence(f"the SGLang server does not answer: {error}")
                    return
            await asyncio.sleep(_EVERY_S)

    def _update(self, answer: Any) -> None:
        if not self._path:
            return
        try:
            self.latest = parse_load(answer)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            log.warning("the load metrics of the SGLang server at %s are not understood: %r", self._path, error)
            # It is watched without them.
            self._path = ""


def parse_load(answer: Any) -> LoadMetrics:
    """Load metrics of all its replicas together; the names differ by endpoint."""
    loads = answer["loads"] if isinstance(answer, dict) and "loads" in answer else answer
    replicas: list[dict[str, Any]] = loads if isinstance(loads, list) else [loads]
    usage = [float(load["token_usage"]) for load in replicas if "token_usage" in load]
    running = sum(int(load.get("num_running_reqs", load.get("num_reqs", 0))) for load in replicas)
    waiting = sum(int(load.get("num_waiting_reqs", 0)) for load in replicas)
    return LoadMetrics(running=running, waiting=waiting, kv_usage=max(usage, default=None), preemptions=0)
