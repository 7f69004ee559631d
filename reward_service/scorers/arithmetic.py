"""Arithmetic: 1 if the answer is the number that the ground truth is (`07` is 7, `1,000` is 1000).

The answer is what follows the last `=`, or the whole response. It must be one number and nothing else, so that listing
many numbers earns nothing.
"""

from __future__ import annotations

from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored, Unscorable
from rollmesh.reward_service.scorers.numbers import parse_number


def score(item: RewardItem) -> Outcome:
    """1.0 or 0.0; unscorable where the ground truth is not a number."""
    truth = parse_number(item.ground_truth)
    if truth is None:
        return Unscorable(f"the ground truth is not a number: {item.ground_truth!r}")
    answer = parse_number(item.response.rpartition("=")[2])
    return Scored(float(answer is not None and answer == truth))
