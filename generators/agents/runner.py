"""Answers members of groups with episodes, many at once.

It runs between the rollout loop and the engine. Invariants: every request ends in exactly one `EpisodeResult`,
delivered in the event loop. While a pinned episode is under way the engine's weights do not change, also between its
turns.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

from rollmesh.generators.agents.chat_template import ChatRenderer
from rollmesh.generators.agents.drivers import Driver
from rollmesh.generators.agents.episode import Episode, EpisodeLimits
from rollmesh.generators.agents.turn_requests import TurnRequests
from rollmesh.generators.agents.user_code_executor import UserCodeExecutor
from rollmesh.generators.engines.interface import InferenceEngine
from rollmesh.generators.engines.types import EngineStatus, GenerationResult, PartialResponse
from rollmesh.generators.rollout.awake_clock import AwakeClock
from rollmesh.generators.rollout.response_source import EpisodeResult, MemberRequest

log = logging.getLogger(__name__)
_COUNTED = ("turns", "tool_calls", "tool_errors", "tool_timeouts", "tool_seconds")


class AgentRunner:
    """A `ResponseSource` whose responses are episodes; all methods belong to the event loop's thread.

    `connect` comes before the first request.

    Args:
        engine: samples turns; its results come in through `accept_results`.
        make_driver: makes the driver of an episode.
        chat: renders.
        limits: of an episode.
        user_calls: runs tools and environments.
        clock: for the time that an episode may take.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        *,
        make_driver: Callable[[MemberRequest], Driver],
        chat: ChatRenderer,
        limits: EpisodeLimits,
        user_calls: UserCodeExecutor,
        clock: AwakeClock,
    ) -> None:
        self._engine = engine
        self._make_driver = make_driver
        self._chat = chat
        self._limits = limits
        self._user_calls = user_calls
        self._clock = clock
        self._on_results: Callable[[list[GenerationResult]], None]
        self._turns = TurnRequests(engine)
        self._episodes: dict[str, tuple[Episode, asyncio.Task[EpisodeResult]]] = {}
        self._ended: list[GenerationResult] = []
        self._closed = False
        self._stats = dict.fromkeys(("episodes", "episodes_failed", "drafts_not_gone_on", *_COUNTED), 0.0)

    def connect(self, on_results: Callable[[list[GenerationResult]], None]) -> None:
        """Sets the callback for ended episodes, which runs in the event loop."""
        self._on_results = on_results

    @property
    def stats(self) -> dict[str, float]:
        """Counts since the start, by name; `calls_hanging`: calls into user code that do not return."""
        return {**self._stats, "calls_hanging": float(self._user_calls.lost)}

    def submit(self, requests: Sequence[MemberRequest]) -> None:
        """Begins episodes."""
        loop = asyncio.get_running_loop()
        for request in requests:
            episode = Episode(request, self._make_driver, self._chat, self._turns, self._limits, self._clock)
            task = loop.create_task(episode.run())
            self._episodes[request.request_id] = (episode, task)
            task.add_done_callback(lambda done, name=request.request_id: self._end(name, done))  # type: ignore[misc]  # mypy cannot type it

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends episodes early; each still gets its result."""
        for request_id in request_ids:
            if request_id in self._episodes:
                self._episodes[request_id][1].cancel()

    def progress(self, at_least: Mapping[str, int]) -> Future[list[PartialResponse]]:
        """Copies the tokens of running episodes; see `InferenceEngine.progress`."""
        found: Future[list[PartialResponse]] = Future()
        minimum = {name: tokens for name, tokens in at_least.items() if name in self._episodes}
        sampling = {turn_id: 1 for name in minimum if (turn_id := self._episodes[name][0].turn_id)}
        if not sampling:
            found.set_result(self._partial_responses(minimum, []))
            return found
        loop = asyncio.get_running_loop()

        def finish(running: Future[list[PartialResponse]]) -> None:
            if not found.set_running_or_notify_cancel():
                return
            error = running.exception()
            if error is not None:
                found.set_exception(error)
            else:
                found.set_result(self._partial_responses(minimum, running.result()))

        self._engine.progress(sampling).add_done_callback(lambda running: loop.call_soon_threadsafe(finish, running))
        return found

    def status(self) -> EngineStatus:
        """Status of the engine."""
        return self._engine.status()

    def accept_results(self, results: Sequence[GenerationResult]) -> list[GenerationResult]:
        """Accepts the engine's results and returns those that are no turn of an episode."""
        return self._turns.accept_results(results)

    async def close(self) -> None:
        """Ends all episodes without a result."""
        self._closed = True
        tasks = [task for _, task in self._episodes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._user_calls.close()

    def _partial_responses(
        self, minimum: Mapping[str, int], running: Sequence[PartialResponse]
    ) -> list[PartialResponse]:
        by_turn = {part.request_id: part.sampled for part in running}
        now = time.monotonic()
        parts = []
        for name, tokens in minimum.items():
            if name not in self._episodes:
                continue
            episode = self._episodes[name][0]
            sampled = episode.progress(by_turn.get(episode.turn_id))
            if sampled is not None and len(sampled) >= tokens:
                parts.append(PartialResponse(name, sampled, now - episode.started))
        return parts

    def _end(self, name: str, task: asyncio.Task[EpisodeResult]) -> None:
        episode, _ = self._episodes.pop(name)
        if self._closed:
            return
        if task.cancelled():
            result = EpisodeResult.empty(name, aborted=True)
        elif (error := task.exception()) is not None:
            log.error("an episode failed", exc_info=error)
            result = EpisodeResult.empty(name, failure=f"{type(error).__name__}: {error}")
        else:
            result = task.result()
        self._stats["episodes"] += 1
        self._stats["episodes_failed"] += bool(result.failure)
        self._stats["drafts_not_gone_on"] += episode.restarted
        for key in _COUNTED:
            self._stats[key] += result.stats.get(key, 0.0)
        if not self._ended:
            asyncio.get_running_loop().call_soon(self._deliver)
        self._ended.append(result)

    def _deliver(self) -> None:
        ended, self._ended = self._ended, []
        self._on_results(ended)
