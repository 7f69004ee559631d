"""Scores by key: kept, or being computed already, or computed now.

Invariants
  * A caller gets the score of its own key, or what was computed for its own item.
  * Errors are neither kept nor shared. A caller that waited for an item that failed gets its own one computed.
  * A caller that waited for an item that was not begun, or whose caller is gone, takes its place. So it waits for no
    computation that has ended.
  * Each item has its outcome by its call's deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from rollmesh.mesh.config.scorers.cache import CacheSection
from rollmesh.reward_service.cache import values
from rollmesh.reward_service.cache.memory import MemoryStore
from rollmesh.reward_service.call_times import CallTimes
from rollmesh.reward_service.outcomes import NOT_BEGUN, Failed, Outcome, not_begun

if TYPE_CHECKING:
    from rollmesh.reward_service.cache.redis_store import RedisStore

OnOutcome = Callable[[int, Outcome], None]
"""Receives an item's index, and its outcome; called on the event loop."""
Compute = Callable[[Sequence[int], OnOutcome], Awaitable[None]]
"""Computes the outcomes of items, by their indices; all of them come before it returns."""


@dataclass(slots=True)
class CacheStats:
    """Counts of items since the start, by what became of them.

    Attributes:
        memory: found in memory.
        redis: found in Redis.
        joined: computed for another item at the same time.
        missed: computed, or failed.
    """

    memory: int = 0
    redis: int = 0
    joined: int = 0
    missed: int = 0

    @property
    def hits(self) -> int:
        """Items that were not computed."""
        return self.memory + self.redis + self.joined

    @property
    def lookups(self) -> int:
        """All items."""
        return self.hits + self.missed


class _End(Enum):
    """Ends of a computation without a score."""

    # It has failed.
    FAILED = auto()
    # It was not begun, or its caller is gone.
    LEFT = auto()


_Flight = asyncio.Future[bytes | _End]


class ScoreCache:
    """The cache of one process; it belongs to one event loop.

    Args:
        section: of the configuration.

    Attributes:
        functions: that the user calls deterministic.
        memory: the store in memory.
        redis: the store in Redis; none: there is none.
        stats: see `CacheStats`.

    Raises:
        ConfigError: the password of Redis cannot be read.
    """

    def __init__(self, section: CacheSection) -> None:
        self.functions = frozenset(section.functions)
        self.memory = MemoryStore(section.max_bytes)
        self.redis: RedisStore | None = None
        if (address := section.address) is not None:
            # Only here: few runs share scores.
            from rollmesh.reward_service.cache.redis_store import RedisStore

            self.redis = RedisStore(address, timeout_s=section.redis_timeout_s, ttl_s=section.redis_ttl_s)
        self.stats = CacheStats()
        self._flights: dict[bytes, _Flight] = {}

    async def answer(
        self, keys: Mapping[int, bytes], compute: Compute, times: CallTimes, on_outcome: OnOutcome
    ) -> None:
        """Finds or computes the outcomes of items.

        Args:
            keys: by the items' indices.
            compute: is called for those without a score.
            times: of the call.
            on_outcome: gets each item's outcome as soon as it is there; all of them before this returns.
        """
        leading: dict[int, bytes] = {}
        joining: dict[int, _Flight] = {}
        for index, key in keys.items():
            if (kept := self._kept(key)) is not None:
                self.stats.memory += 1
                on_outcome(index, kept)
            elif (flight := self._flights.get(key)) is not None:
                joining[index] = flight
            else:
                self._flights[key] = asyncio.get_running_loop().create_future()
                leading[index] = key
        if not joining:
            await self._lead(leading, compute, on_outcome)
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._lead(leading, compute, on_outcome))
            for index, flight in joining.items():
                tasks.create_task(self._join(index, keys[index], flight, compute, times, on_outcome))

    async def close(self) -> None:
        """Ends writes under way."""
        if self.redis is not None:
            await self.redis.close()

    def _kept(self, key: bytes) -> Outcome | None:
        value = self.memory.get(key)
        return None if value is None else values.unpack(value)

    def _keep(self, key: bytes, outcome: Outcome) -> bytes | _End:
        """Keeps a computed outcome, unless it is an error; returns what those get who wait for it."""
        self.stats.missed += 1
        if isinstance(outcome, Failed):
            return _End.LEFT if outcome.code == NOT_BEGUN else _End.FAILED
        value = values.pack(outcome)
        self.memory.put(key, value)
        if self.redis is not None:
            self.redis.put(key, value)
        return value

    async def _lead(self, leading: Mapping[int, bytes], compute: Compute, on_outcome: OnOutcome) -> None:
        """Computes items for all who ask the same meanwhile."""
        flights = {index: self._flights[key] for index, key in leading.items()}

        def end(index: int, with_: bytes | _End) -> None:
            del self._flights[leading[index]]
            flights.pop(index).set_result(with_)

        def accept(index: int, outcome: Outcome) -> None:
            end(index, self._keep(leading[index], outcome))
            on_outcome(index, outcome)

        try:
            if self.redis is not None and leading:
                for index, value in zip(leading, await self.redis.get(list(leading.values())), strict=True):
                    if value is not None and (kept := values.unpack(value)) is not None:
                        self.stats.redis += 1
                        self.memory.put(leading[index], value)
                        end(index, value)
                        on_outcome(index, kept)
            if flights:
                await compute(list(flights), accept)
        finally:
            for index in list(flights):
                end(index, _End.LEFT)

    async def _join(
        self, index: int, key: bytes, flight: _Flight, compute: Compute, times: CallTimes, on_outcome: OnOutcome
    ) -> None:
        """Waits for an item of the same key."""
        await asyncio.wait((flight,), timeout=max(0.0, times.deadline - time.monotonic()))
        end = flight.result() if flight.done() else None
        if isinstance(end, bytes) and (outcome := values.unpack(end)) is not None:
            self.stats.joined += 1
            on_outcome(index, outcome)
        elif end is None or time.monotonic() >= times.begin_by:
            on_outcome(index, not_begun("an equal item was computed meanwhile, without a score"))
        elif end is _End.FAILED:

            def accept(index: int, outcome: Outcome) -> None:
                self._keep(key, outcome)
                on_outcome(index, outcome)

            await compute([index], accept)
        else:
            await self.answer({index: key}, compute, times, on_outcome)
