"""Seconds per batch of the placement in force, from records of steps and of turns. Pure.

The learner trains several batches in one turn, quickly after one another. So only whole turns are measured. The first
batches after a change are left out: they were generated before it. So is the time of evaluations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rollmesh.launcher.trials.estimates import UNKNOWN, Bounds, Measurement
from rollmesh.mesh.config.placement import PlacementMode
from rollmesh.report.metrics import Record, is_evaluation, is_training
from rollmesh.report.turns import PhaseChange, spans

_TURNS = "placement/turns"
# A learner that waits for less than this share of its time is what bounds the speed.
_WAITS = 0.1


@dataclass(frozen=True, slots=True)
class MeasuringRules:
    """Extent of a measurement.

    Attributes:
        batches: measured at least.
        seconds: measured at least: batches of milliseconds vary.
        warm_up: batches left out at the beginning, where sides work at the same time; in turns it is the first turn.
    """

    batches: int
    seconds: float
    warm_up: int


@dataclass(frozen=True, slots=True)
class _Interval:
    began: float
    ended: float
    steps: Sequence[Record]


def measure(
    mode: PlacementMode, records: Sequence[Record], turns: Sequence[PhaseChange], rules: MeasuringRules
) -> Measurement | None:
    """The measurement; None until there are enough batches.

    Args:
        mode: of the placement.
        records: of metrics, since the placement is in force.
        turns: of the run; those of its time are taken.
        rules: see there.
    """
    evaluations = [_evaluation(record) for record in records if is_evaluation(record)]
    kept = [
        one
        for one in _intervals(mode, [record for record in records if is_training(record)], rules.warm_up)
        if not any(one.began < ended and began < one.ended for began, ended in evaluations)
    ]
    batches = sum(len(one.steps) for one in kept)
    seconds = sum(one.ended - one.began for one in kept)
    if batches < rules.batches or seconds < rules.seconds:
        return None
    batch_s = seconds / batches
    if mode == "split":
        return Measurement(batch_s, batches, *_sides_at_once(kept, batch_s))
    sides = _sides_in_turns(kept, turns)
    swap_s = sides["swap"] / batches
    if mode == "hybrid":
        return Measurement(batch_s, batches, UNKNOWN, UNKNOWN, swap_s)
    training_s = sides["training"] / batches
    # Generation in turns waits for tails and rewards, which would not delay it while both sides work.
    generation = Bounds(0.0, sides["generating"] / batches)
    return Measurement(batch_s, batches, generation, Bounds(training_s, training_s), swap_s)


def _intervals(mode: PlacementMode, steps: Sequence[Record], warm_up: int) -> Iterator[_Interval]:
    """The time between two batches, and in turns that between the last batches of two turns."""
    last = [
        index
        for index, record in enumerate(steps)
        if mode == "split" or (index + 1 < len(steps) and steps[index + 1].get(_TURNS) != record.get(_TURNS))
    ]
    for before, now in pairwise(last[warm_up if mode == "split" else 0 :]):
        yield _Interval(steps[before]["time"], steps[now]["time"], steps[before + 1 : now + 1])


def _sides_at_once(kept: Sequence[_Interval], batch_s: float) -> tuple[Bounds, Bounds]:
    """Generation and training where both work at the same time: who is waited for shows its own time."""
    steps = [step for one in kept for step in one.steps]
    waits = sum(float(step["timing_s/gen"]) for step in steps) / len(steps)
    training_s = max(0.0, batch_s - waits)
    generation = Bounds(batch_s, batch_s) if waits >= _WAITS * batch_s else Bounds(0.0, batch_s)
    return generation, Bounds(training_s, training_s)


def _sides_in_turns(kept: Sequence[_Interval], turns: Sequence[PhaseChange]) -> dict[str, float]:
    """Seconds of each side, and of swaps."""
    sides = {"generating": 0.0, "training": 0.0, "swap": 0.0}
    for one in kept:
        for began, ended, side in spans(turns, one.ended):
            sides[side] += max(0.0, min(ended, one.ended) - max(began, one.began))
    return sides


def _evaluation(record: Record) -> tuple[float, float]:
    """Its beginning and end, as Unix times."""
    ended = float(record["time"])
    return ended - float(record.get("eval/seconds") or 0.0), ended
