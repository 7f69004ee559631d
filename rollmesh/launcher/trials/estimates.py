"""Seconds per batch in each placement, as bounds, from what other placements have shown. Pure.

More devices or cores make a side faster by something between nothing and their ratio: long tails and interpreters gain
nothing, matrix products nearly all. So a measurement gives two bounds for every other division.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rollmesh.mesh.config.placement import PlacementMode


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a time.

    Attributes:
        low, high: seconds.
    """

    low: float
    high: float

    def scaled(self, before: int, now: int) -> Bounds:
        """The bounds with another number of devices or cores."""
        ratio = before / now
        return Bounds(self.low * min(1.0, ratio), self.high * max(1.0, ratio))

    def __str__(self) -> str:
        return f"{self.low:.3g} to {self.high:.3g} s"


@dataclass(frozen=True, slots=True)
class Division:
    """Devices, or cores on a CPU, of both sides while they work.

    Attributes:
        mode: of the placement.
        learner: of all ranks.
        generators: of all generators; with `hybrid`, of those that have their own.
    """

    mode: PlacementMode
    learner: int
    generators: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """A placement in the running mesh.

    Attributes:
        batch_s: seconds per batch, which decide.
        batches: measured.
        generation, training: seconds per batch of each side, as far as they show themselves.
        swap_s: seconds per batch in swaps.
    """

    batch_s: float
    batches: int
    generation: Bounds
    training: Bounds
    swap_s: float = 0.0


UNKNOWN = Bounds(0.0, float("inf"))
"""Bounds of a time that nothing was learned about."""


def estimate(division: Division, seen: Mapping[Division, Measurement]) -> Bounds:
    """Bounds of the seconds per batch of a placement.

    Args:
        division: of the placement.
        seen: measurements so far, at least one of them in turns.
    """
    if (own := seen.get(division)) is not None:
        return Bounds(own.batch_s, own.batch_s)
    training = _intersection(
        one.training.scaled(other.learner, division.learner) for other, one in seen.items() if one.training != UNKNOWN
    )
    generation = _generation(division.generators, seen)
    swap_s = max((one.swap_s for one in seen.values()), default=0.0)
    if division.mode == "split":
        return Bounds(max(training.low, generation.low), max(training.high, generation.high))
    shared = _generation(division.learner, seen)
    # Sides are known only as far as they have shown themselves; the least of all is that both cost nothing.
    return Bounds(
        _hybrid_s(training.low, generation.low, shared.low, swap_s),
        _hybrid_s(training.high, generation.high, shared.high, swap_s),
    )


def _generation(units: int, seen: Mapping[Division, Measurement]) -> Bounds:
    return _intersection(
        one.generation.scaled(other.generators, units) for other, one in seen.items() if one.generation != UNKNOWN
    )


def _hybrid_s(training_s: float, own_s: float, shared_s: float, swap_s: float) -> float:
    """Seconds per batch where generators of their own always generate, and the learner's devices do between turns.

    Args:
        training_s: of a batch.
        own_s, shared_s: of the generation of a batch by either alone.
        swap_s: of a batch.
    """
    turn_s = training_s + swap_s
    if own_s <= turn_s:
        return turn_s
    # In t seconds: t / own + (t - turn) / shared = 1 batch.
    return own_s * (shared_s + turn_s) / (own_s + shared_s)


def _intersection(bounds: Iterable[Bounds]) -> Bounds:
    """The part that all bounds share; where noise makes them contradict each other, the gap between them."""
    found = list(bounds)
    if not found:
        return UNKNOWN
    low, high = max(one.low for one in found), min(one.high for one in found)
    return Bounds(min(low, high), max(low, high))
