"""Grade-school math: the answer after the last `####`, or else the last number, compared as a number.

Components: `correct` (the reward) and `format` (whether `####` introduced the answer), both 0 or 1.
"""

from __future__ import annotations

from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored, Unscorable
from rollmesh.reward_service.scorers.numbers import NUMBER, parse_number

_MARK = "####"


def score(item: RewardItem) -> Outcome:
    """1.0 or 0.0; unscorable where the ground truth holds no number. Full solutions are accepted as ground truth."""
    truth = parse_number(str(item.ground_truth).rpartition(_MARK)[2])
    if truth is None:
        return Unscorable(f"the ground truth holds no number: {item.ground_truth!r}")
    _, mark, tail = item.response.rpartition(_MARK)
    numbers = NUMBER.findall(tail)
    chosen = (numbers[0] if mark else numbers[-1]) if numbers else None
    correct = float(chosen is not None and parse_number(chosen) == truth)
    return Scored(correct, {"correct": correct, "format": float(bool(mark))})
