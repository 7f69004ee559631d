"""Seconds per batch of the placement in force, from records of steps and of turns. Pure.

The learner trains several batches in one turn, quickly after one another. So only whole turns are measured. The first
batches after a change or a disturbance are left out: they were generated before it. The time of an evaluation is
subtracted where no batch ended meanwhile. Batches that ended amid one count only where there are few others.

The mean counts, not the median. With long tails and groups that are sealed together most batches follow one another
quickly, and few of them take nearly all of the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollmesh.launcher.trials.estimates import UNKNOWN, Bounds, Measurement
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.placement import PlacementMode
from rollmesh.report.metrics import Record, is_evaluation, is_training
from rollmesh.report.turns import PhaseChange, spans

_TURNS = "placement/turns"
# A learner that waits for less than this share of its time is what bounds the speed.
_WAITS = 0.1
# So many times the batches are waited for that no evaluation overlaps with.
_PATIENCE = 3

Span = tuple[float, float]


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


def least_batches(asked: Config) -> tuple[int, int]:
    """Batches that the measurement in turns takes at least, and those of a trial.

    Args:
        asked: the configuration, with `placement.mode: auto`.
    """
    staleness, measured = asked.buffer.max_staleness, asked.placement.trial_batches
    turn = asked.placement.batches_per_turn or max(1, staleness)
    # The first turn is left out, and the last one is over once the next has begun.
    return turn * (1 + math.ceil(measured / turn)) + 1, staleness + 2 + measured


@dataclass(slots=True)
class _Interval:
    began: float
    ended: float
    batches: int
    waited: float
    phases: list[tuple[float, float, str]]
    # Those that overlap with it.
    evaluations: list[Span]

    @property
    def is_clean(self) -> bool:
        """No evaluation began or ended outside."""
        return all(self._contains(one) for one in self.evaluations)

    @property
    def seconds(self) -> float:
        return self.without_evaluations(self.began, self.ended)

    def without_evaluations(self, began: float, ended: float) -> float:
        """Seconds of a part, without those of evaluations within the interval."""
        within = filter(self._contains, self.evaluations)
        return ended - began - sum(max(0.0, min(ended, last) - max(began, first)) for first, last in within)

    def _contains(self, evaluation: Span) -> bool:
        return self.began <= evaluation[0] and evaluation[1] <= self.ended


class Meter:
    """Measures a placement as records come; it keeps only what can still count.

    Args:
        mode: of the placement.
        rules: see there.
    """

    def __init__(self, mode: PlacementMode, rules: MeasuringRules) -> None:
        self._mode = mode
        self._rules = rules
        self._kept: list[_Interval] = []
        self._evaluations: list[Span] = []
        self._phases: list[PhaseChange] = []
        self._last: Record | None = None
        # Beginning of the interval that is not over, and its records.
        self._began: float | None = None
        self._open: list[Record] = []
        self._left_out = 0

    def add(
        self,
        records: Sequence[Record],
        phases: Sequence[PhaseChange],
        is_disturbed: Callable[[float, float], bool] = lambda _began, _ended: False,
    ) -> Measurement | None:
        """The measurement; None until there are enough batches.

        Args:
            records: new ones of metrics, since the placement is in force.
            phases: new ones of the run.
            is_disturbed: true for a time that does not count.
        """
        self._phases += phases
        for record in records:
            if is_evaluation(record):
                self._add_evaluation(evaluation_span(record))
            elif is_training(record):
                self._add_step(record, is_disturbed)
        self._forget()
        return self._measurement()

    def _add_evaluation(self, evaluation: Span) -> None:
        self._evaluations.append(evaluation)
        # Steps end amid it, so it is told of after them.
        for one in reversed(self._kept):
            if one.ended <= evaluation[0]:
                break
            if one.began < evaluation[1]:
                one.evaluations.append(evaluation)

    def _add_step(self, record: Record, is_disturbed: Callable[[float, float], bool]) -> None:
        last, self._last = self._last, record
        if last is not None and (_is_of_another_learner(last, record) or is_disturbed(last["time"], record["time"])):
            last, self._began, self._open, self._left_out = None, None, [], 0
        if self._mode == "split":
            self._open.append(record)
            self._left_out += 1
            if self._left_out > self._rules.warm_up:
                self._close(record["time"])
            return
        if last is not None and last.get(_TURNS) != record.get(_TURNS):
            self._close(last["time"])
        self._open.append(record)

    def _close(self, ended: float) -> None:
        """Ends an interval, and begins the next one."""
        if self._began is not None:
            began, steps = self._began, self._open
            clipped = [
                (max(began, first), min(ended, end), side)
                for first, end, side in spans(self._phases, ended)
                if first < ended and began < end
            ]
            waited = sum(float(step["timing_s/gen"]) for step in steps)
            overlapping = [one for one in self._evaluations if one[0] < ended and began < one[1]]
            self._kept.append(_Interval(began, ended, len(steps), waited, clipped, overlapping))
        self._began, self._open = ended, []

    def _forget(self) -> None:
        """Drops evaluations and phases that the interval which is not over cannot overlap with."""
        if self._last is None:
            return
        present = self._last["time"] if self._began is None else self._began
        self._evaluations = [one for one in self._evaluations if one[1] > present]
        # The phase of that moment began before it.
        before = [index for index, change in enumerate(self._phases) if change.began <= present]
        self._phases = self._phases[before[-1] if before else 0 :]

    def _measurement(self) -> Measurement | None:
        clean = [one for one in self._kept if one.is_clean]
        if self._suffices(clean, 1):
            return self._measured(clean)
        # Evaluations that never end are a part of the run's work.
        return self._measured(self._kept) if self._suffices(self._kept, _PATIENCE) else None

    def _suffices(self, intervals: Sequence[_Interval], times: int) -> bool:
        batches, seconds = sum(one.batches for one in intervals), sum(one.seconds for one in intervals)
        return batches >= times * self._rules.batches and seconds >= times * self._rules.seconds

    def _measured(self, kept: Sequence[_Interval]) -> Measurement:
        batches = sum(one.batches for one in kept)
        batch_s = sum(one.seconds for one in kept) / batches
        if self._mode == "split":
            # The learner has waited while generators answered held-out prompts alone.
            waited = sum(max(0.0, one.waited - (one.ended - one.began - one.seconds)) for one in kept)
            return Measurement(batch_s, batches, *_sides_at_once(waited / batches, batch_s))
        sides = {"generating": 0.0, "training": 0.0, "swap": 0.0}
        for one in kept:
            for began, ended, side in one.phases:
                sides[side] += one.without_evaluations(began, ended)
        swap_s = sides["swap"] / batches
        if self._mode == "hybrid":
            return Measurement(batch_s, batches, UNKNOWN, UNKNOWN, swap_s)
        training_s = sides["training"] / batches
        # Generation in turns waits for tails and rewards, which would not delay it while both sides work.
        generation = Bounds(0.0, sides["generating"] / batches)
        return Measurement(batch_s, batches, generation, Bounds(training_s, training_s), swap_s)


def evaluation_span(record: Record) -> Span:
    """Beginning and end of an evaluation, as Unix times."""
    ended = float(record["time"])
    return ended - float(record.get("eval/seconds") or 0.0), ended


def _is_of_another_learner(last: Record, record: Record) -> bool:
    """True where a learner has continued at a checkpoint, or counts its turns from the first one."""
    return int(record["step"]) <= int(last["step"]) or record.get(_TURNS, 0.0) < last.get(_TURNS, 0.0)


def _sides_at_once(waited_s: float, batch_s: float) -> tuple[Bounds, Bounds]:
    """Generation and training where both work at the same time: who is waited for shows its own time."""
    training_s = max(0.0, batch_s - waited_s)
    generation = Bounds(batch_s, batch_s) if waited_s >= _WAITS * batch_s else Bounds(0.0, batch_s)
    return generation, Bounds(training_s, training_s)
