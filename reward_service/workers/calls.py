"""Calls for scores, and their units, which go to workers.

Invariants: each unit of a call gets one answer. A unit still open at the call's deadline is answered then; one not
begun is answered when it is too late to begin it.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from rollmesh.reward_service.call_times import CallTimes
from rollmesh.reward_service.outcomes import Failed, OnAnswer, Outcome
from rollmesh.reward_service.workers.messages import pack

CLOSED = Failed("closed", "the reward workers are closed", retryable=True)


class Call:
    """A call that waits for several units.

    Args:
        times: until when its units may be begun, and its deadline.
        on_answer: called with the place and the answer of each unit, as soon as it is there.
    """

    def __init__(self, units: int, times: CallTimes, on_answer: OnAnswer = lambda _place, _answer: None) -> None:
        self.times = times
        self._on_answer = on_answer
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.answers: list[list[Outcome] | Failed | None] = [None] * units
        self._open = units

    def answer(self, place: int, answer: list[Outcome] | Failed) -> None:
        """Answers one unit; a second answer is dropped."""
        if self.answers[place] is not None:
            return
        self.answers[place] = answer
        self._on_answer(place, answer)
        self._open -= 1
        if not self._open and not self.done.done():
            self.done.set_result(None)


class Trial(Enum):
    """Ways to try a unit: with more care after each worker whose death it may have caused."""

    TOGETHER = auto()
    # As before, once more: when a worker of coroutines dies, mostly no coroutine is at fault.
    AGAIN = auto()
    # While its worker holds nothing else.
    ALONE = auto()
    # Alone, and before anything else in a new worker. If the worker dies then, the unit is guilty.
    FIRST = auto()


@dataclass(slots=True, eq=False)
class Unit:
    """Items that one call of a function gets.

    Attributes:
        function: its index.
        items: serialized ScoreItems.
        queued: monotonic time at which it began to wait.
        begun: a worker holds it.
        trial: how it is tried.
    """

    call: Call
    place: int
    function: int
    items: Sequence[bytes]
    queued: float = field(default_factory=time.monotonic)
    begun: bool = False
    trial: Trial = Trial.TOGETHER

    @property
    def open(self) -> bool:
        """True while the caller still waits for its answer."""
        return self.call.answers[self.place] is None

    @property
    def key(self) -> bytes:
        """A key that is equal for units of any two calls that ask the same of the same items."""
        return hashlib.blake2b(pack([self.function, list(self.items)]), digest_size=16).digest()

    def answer(self, answer: list[Outcome] | Failed) -> None:
        """Answers it."""
        if not isinstance(answer, Failed) and len(answer) != len(self.items):
            answer = Failed("internal", f"{len(answer)} outcomes for {len(self.items)} items")
        self.call.answer(self.place, answer)
