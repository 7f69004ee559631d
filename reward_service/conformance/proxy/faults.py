"""Faults by a seed: the same calls in the same order meet the same ones."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults, as probabilities from 0 to 1 unless said otherwise.

    Attributes:
        delay_s: seconds that an answer, or a result of a stream, may come later; at random from 0.
        error_rate: calls that fail at once, as if the connection had been lost (UNAVAILABLE).
        drop: calls that reach the server, whose answer never comes.
        lose: results that are missing in their answer.
        duplicate: calls that reach the server twice; the second answer counts.
        reorder: 1: results come in any order.
        cut_after: number of calls after which all connections are cut, with the calls in progress; 0: never.
        seed: of all chances.
    """

    delay_s: float = 0.0
    error_rate: float = 0.0
    drop: float = 0.0
    lose: float = 0.0
    duplicate: float = 0.0
    reorder: bool = False
    cut_after: int = 0
    seed: int = 0

    def for_call(self, number: int) -> CallFaults:
        """The faults of a call, which is the `number`-th."""
        chance = random.Random(f"{self.seed}/{number}")  # noqa: S311 - no secret
        return CallFaults(
            chance,
            delay_s=chance.uniform(0, self.delay_s),
            fails=chance.random() < self.error_rate,
            drops=chance.random() < self.drop,
            repeats=chance.random() < self.duplicate,
            cuts=self.cut_after > 0 and number % self.cut_after == 0,
        )


@dataclass(frozen=True, slots=True)
class CallFaults:
    """The faults of one call."""

    chance: random.Random
    delay_s: float
    fails: bool
    drops: bool
    repeats: bool
    cuts: bool


@dataclass(slots=True)
class Counts:
    """Faults so far."""

    calls: int = 0
    failed: int = 0
    dropped: int = 0
    repeated: int = 0
    lost_results: int = 0
    cuts: int = 0

    def meet(self, faults: Faults) -> CallFaults:
        """Counts one more call, and decides about it; cuts are counted where they happen."""
        self.calls += 1
        own = faults.for_call(self.calls)
        self.failed += own.fails
        self.dropped += own.drops
        self.repeated += own.repeats
        return own

    def __str__(self) -> str:
        return ", ".join(f"{each.name.replace('_', ' ')} {getattr(self, each.name)}" for each in fields(self))
