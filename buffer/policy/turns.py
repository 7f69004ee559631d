"""Turns of work for generators at one front: some at once, and fewer while the learner is being served.

Thousands of generators can ask for more than a front and its Redis can do. The learner's few calls would then wait, at
each of their steps, for all the work that has been begun before them. So only as much is begun as keeps Redis busy.

Invariants
  * First come, first served.
  * While the learner is being served, work of generators begins only where less than `with_learner` is in progress.
    So it never stops, and each step of a call of the learner waits for a bounded amount of it.
  * A waiter that is cancelled leaves its turn to the next one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

# Redis groups the writes of one turn of its loop into one fsync, so several must be under way.
_AT_ONCE = 32
_WITH_LEARNER = 8


class GeneratorTurns:
    """The turns of one front.

    Args:
        at_once: pieces of work in progress at most.
        with_learner: the same while the learner is being served.
    """

    def __init__(self, at_once: int = _AT_ONCE, with_learner: int = _WITH_LEARNER) -> None:
        self._at_once = at_once
        self._with_learner = with_learner
        self._in_progress = 0
        self._learner_calls = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for a turn, which lasts as long as the context."""
        if self._has_room:
            self._in_progress += 1
        else:
            await self._wait()
        try:
            yield
        finally:
            self._in_progress -= 1
            self._give_turns()

    @contextmanager
    def serving_learner(self) -> Iterator[None]:
        """Marks that a call of the learner is in progress."""
        self._learner_calls += 1
        try:
            yield
        finally:
            self._learner_calls -= 1
            self._give_turns()

    @property
    def _has_room(self) -> bool:
        return self._in_progress < (self._with_learner if self._learner_calls else self._at_once)

    async def _wait(self) -> None:
        given = asyncio.get_running_loop().create_future()
        self._waiting.append(given)
        try:
            await given
        except asyncio.CancelledError:
            if not given.cancelled():
                self._in_progress -= 1
                self._give_turns()
            raise

    def _give_turns(self) -> None:
        while self._waiting and self._has_room:
            given = self._waiting.popleft()
            if not given.cancelled():
                self._in_progress += 1
                given.set_result(None)
