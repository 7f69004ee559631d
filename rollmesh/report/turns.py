"""Turns on shared devices: phases over time (`RUN/turns.jsonl`), and the time that swaps take (`placement/...`)."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollmesh.learner.placement.swap import TO_GENERATING, TO_TRAINING, Phase
from rollmesh.learner.placement.turn_log import FILE
from rollmesh.report.metrics import MetricsTail, Record, metric_value, read_metrics

PHASES = tuple(str(phase) for phase in (Phase.GENERATING, *TO_TRAINING, Phase.TRAINING, *TO_GENERATING))
"""All phases in the order of a turn."""
_DIRECTIONS = {"to_training_s": TO_TRAINING, "to_generating_s": TO_GENERATING}
# The last value counts, not the median.
_TOTALS = ("swap_share", "turns", "taken_back")
_PREFIX = "placement/"
_SHARES = {"generating_share": "generating", "training_share": "training", "swap_share": "swaps"}
# The time before this turn is that of the start.
_FIRST_COUNTED = 2


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """The beginning of a phase of shared devices.

    Attributes:
        began: Unix time in seconds.
        turn: number of the learner's turn.
        phase: that begins; see `learner.placement.swap.Phase`.
        reason: why a swap is taken back; empty without one.
    """

    began: float
    turn: int
    phase: str
    reason: str

    @classmethod
    def of(cls, record: Record) -> PhaseChange:
        """A line of the file."""
        return cls(float(record["unix_s"]), int(record["turn"]), str(record["phase"]), str(record["reason"]))


def read_phases(folder: Path) -> list[PhaseChange]:
    """All phases of a run folder, in the order of time; empty without a file."""
    return sorted(map(PhaseChange.of, read_metrics(folder / FILE)), key=lambda change: change.began)


class PhasesTail:
    """Follows the phases of a run folder, from now on.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._tail = MetricsTail(folder / FILE, from_end=True)

    def read(self) -> list[PhaseChange]:
        """The phases that have begun since the call before."""
        return list(map(PhaseChange.of, self._tail.read()))


def phase_at(phases: Sequence[PhaseChange], unix_s: float) -> str:
    """The phase at a moment; empty before the first one."""
    index = bisect.bisect_right(phases, unix_s, key=lambda change: change.began)
    return phases[index - 1].phase if index else ""


def spans(phases: Sequence[PhaseChange], end: float) -> Iterator[tuple[float, float, str]]:
    """Beginning, end and side of each phase: `generating`, `training` or `swap`; neighbors of one side are one.

    Args:
        phases: as `read_phases` gives them.
        end: of the last phase.
    """
    began, side = 0.0, ""
    for change in phases:
        now = change.phase if change.phase in (Phase.GENERATING, Phase.TRAINING) else "swap"
        if now != side:
            if side:
                yield began, change.began, side
            began, side = change.began, now
    if side and end > began:
        yield began, end, side


def time_shares(phases: Sequence[PhaseChange], end: float = 0.0) -> dict[str, float]:
    """Shares of the time of generating, training and swaps, from the learner's second turn on.

    Engines start, and models are loaded, in the first turn. The last phase of a learner that was replaced does not
    count: no one knows its end.

    Args:
        phases: as `read_phases` gives them.
        end: of the last phase, in Unix seconds; earlier than its beginning: it does not count either.

    Returns:
        `generating_share`, `training_share`, `swap_share`, each 0 to 1; empty before the second turn.
    """
    seconds = dict.fromkeys(_SHARES, 0.0)
    for index, change in enumerate(phases):
        after = phases[index + 1] if index + 1 < len(phases) else None
        if change.turn < _FIRST_COUNTED or (after is not None and after.turn < change.turn):
            continue
        side = change.phase if change.phase in (Phase.GENERATING, Phase.TRAINING) else "swap"
        seconds[f"{side}_share"] += max(0.0, (end if after is None else after.began) - change.began)
    total = sum(seconds.values())
    return {name: lasted / total for name, lasted in seconds.items()} if total else {}


def turns_ended(steps: Sequence[Record]) -> float:
    """Unix time of the last step in turns; 0 without one. A run that left turns has trained on without them.

    Args:
        steps: training records, in the order of time; others are skipped.
    """
    return next((float(record["time"]) for record in reversed(steps) if f"{_PREFIX}turns" in record), 0.0)


def swap_times(steps: Sequence[Record]) -> dict[str, float]:
    """Medians of the time of swaps by step and direction, and the last share of time, turns and swaps taken back.

    Args:
        steps: training records.

    Returns:
        By the metric's name without `placement/`; empty where no devices were shared.
    """
    found: dict[str, list[float]] = {}
    for record in steps:
        for name in record:
            if name.startswith(_PREFIX) and (value := metric_value(record, name)) is not None:
                found.setdefault(name.removeprefix(_PREFIX), []).append(value)
    return {name: values[-1] if name in _TOTALS else statistics.median(values) for name, values in found.items()}


def swap_lines(times: Mapping[str, float]) -> Iterator[str]:
    """Swaps in words: a line for each direction with its steps."""
    for direction, phases in _DIRECTIONS.items():
        if direction in times:
            steps = ", ".join(f"{phase} {times[f'{phase}_s']:.2f}" for phase in phases if f"{phase}_s" in times)
            yield f"{direction.removesuffix('_s').replace('_', ' ')} {times[direction]:.2f} s ({steps})"


def share_lines(times: Mapping[str, float]) -> Iterator[str]:
    """The shares of the time of each side and of swaps, as far as they are known; none without shared devices."""
    if "swap_share" in times:
        back = f", {times['taken_back']:.0f} taken back" if times.get("taken_back") else ""
        yield f"{shares_text(times)} of the time in {times.get('turns', 0):.0f} turns{back}"


def shares_text(shares: Mapping[str, float]) -> str:
    """Shares of the time in words, as `time_shares` gives them; empty without any."""
    return ", ".join(f"{words} {shares[name]:.1%}" for name, words in _SHARES.items() if name in shares)
