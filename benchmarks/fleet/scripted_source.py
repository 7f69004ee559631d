"""Responses of scripted lengths at a scripted speed: a generator's engine without a model.

Everything around it is the product's: the rollout loop asks it for responses, and for their tokens so far. The first
responses of a generator are complete after a random part of their time, as if it had been at work for long. So a fleet
is in its steady state at once. Invariant: at most `slots` responses are sampled at once, the others wait in the order
in which they came.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from random import Random

import numpy as np

from benchmarks.buffer.arrays import make_arrays
from benchmarks.fleet.scenario import Lengths
from rollmesh.generators.engines.types import EngineStatus, GenerationResult, PartialResponse
from rollmesh.generators.rollout.response_source import MemberRequest
from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.mesh.trajectory.versions import PolicyVersion, VersionRuns


@dataclass(slots=True)
class _Running:
    request: MemberRequest
    tokens: int
    since: float
    version: PolicyVersion
    timer: asyncio.TimerHandle


class TokenBank:
    """The tokens of all responses of a process: each is a beginning of the same arrays."""

    def __init__(self, most: int) -> None:
        arrays = make_arrays(most, 0)
        self._ids, self._log_probs = arrays["ids"], arrays["log_probs"]
        self._mask = np.ones(most, np.uint8)

    def response(self, tokens: int, prefix: Trajectory | None, version: PolicyVersion) -> Trajectory:
        """The first tokens of a response, those after `prefix` sampled by `version`."""
        before = () if prefix is None else prefix.versions.runs
        rest = tokens - (0 if prefix is None else len(prefix))
        runs = VersionRuns.merged([*before, (rest, version)] if rest else before)
        return Trajectory(self._ids[:tokens], self._log_probs[:tokens], self._mask[:tokens], runs)


class ScriptedSource:
    """The responses of one generator.

    Args:
        bank: the tokens.
        lengths: of the responses.
        seed: of the lengths.
        slots: responses sampled at once.
        on_results: receives each response when it is complete.

    Attributes:
        speed: tokens/s of one response; 0: a response is complete at once.
        serving: version that samples; None before the first.
        sampled: tokens sampled so far.
    """

    def __init__(
        self,
        bank: TokenBank,
        lengths: Lengths,
        seed: int,
        slots: int,
        on_results: Callable[[Sequence[GenerationResult]], None],
    ) -> None:
        self._bank = bank
        self._lengths = lengths
        self._seed = seed
        self._slots = slots
        self._on_results = on_results
        self._queue: deque[MemberRequest] = deque()
        self._running: dict[str, _Running] = {}
        self._to_shorten = slots
        self.speed = 0.0
        self.serving: PolicyVersion | None = None
        self.sampled = 0

    def submit(self, requests: Sequence[MemberRequest]) -> None:
        """Queues requests."""
        self._queue.extend(requests)
        self._start_queued()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests early; the rollout loop waits for no result of theirs."""
        ended = set(request_ids)
        self._queue = deque(request for request in self._queue if request.request_id not in ended)
        for name in ended & self._running.keys():
            self._running.pop(name).timer.cancel()
        self._start_queued()

    def progress(self, at_least: Mapping[str, int]) -> Future[list[PartialResponse]]:
        """The tokens of running responses that are long enough by now."""
        now = asyncio.get_running_loop().time()
        parts = []
        for name, least in at_least.items():
            running = self._running.get(name)
            if running is not None and (tokens := self._tokens_so_far(running, now)) >= max(1, least):
                sampled = self._bank.response(tokens, running.request.prefix, running.version)
                parts.append(PartialResponse(name, sampled, now - running.since))
        found: Future[list[PartialResponse]] = Future()
        found.set_result(parts)
        return found

    def status(self) -> EngineStatus:
        """A snapshot, as an engine gives it."""
        return EngineStatus(len(self._running), len(self._queue), self.sampled, 0, self.serving, "", None)

    def set_speed(self, speed: float) -> None:
        """Changes the speed; responses that are being sampled continue at the new one."""
        now = asyncio.get_running_loop().time()
        for running in self._running.values():
            left = running.tokens - self._tokens_so_far(running, now)
            running.timer.cancel()
            delay = left / speed if speed else 0.0
            running.timer = asyncio.get_running_loop().call_later(delay, self._finish, running.request.request_id)
        self.speed = speed

    def _tokens_so_far(self, running: _Running, now: float) -> int:
        before = 0 if running.request.prefix is None else len(running.request.prefix)
        return min(running.tokens, before + int((now - running.since) * self.speed))

    def _start_queued(self) -> None:
        loop = asyncio.get_running_loop()
        while self._queue and len(self._running) < self._slots and self.serving is not None:
            request = self._queue.popleft()
            before = 0 if request.prefix is None else len(request.prefix)
            tokens = max(before, self._lengths.of(self._seed, request.task.ordinal, request.member))
            delay = (tokens - before) / self.speed if self.speed else 0.0
            if self._to_shorten:
                self._to_shorten -= 1
                # Alike for all members of a group, since the group ends with the last of them.
                delay *= Random(request.task.ordinal).random()
            timer = loop.call_later(delay, self._finish, request.request_id)
            self._running[request.request_id] = _Running(request, tokens, loop.time(), self.serving, timer)

    def _finish(self, name: str) -> None:
        running = self._running.pop(name)
        prefix = running.request.prefix
        sampled = self._bank.response(running.tokens, prefix, running.version)
        self.sampled += running.tokens - (0 if prefix is None else len(prefix))
        self._start_queued()
        self._on_results([GenerationResult(name, sampled, "stop")])
