"""Arithmetic: 1 if the answer is the number that the ground truth is (`07` is 7, `1,000` is 1000).

The answer is what follows the last `=`, or the whole response. It must be one number and nothing else, so that listing
many numbers earns nothing.
"""

from __future__ import annotations

from fractions import Fraction

from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored
from rollmesh.reward_service.scorers.numbers import parse_number
from rollmesh.reward_service.scorers.truths import compares_with, one_number


@compares_with(one_number)
def score(item: RewardItem, truth: Fraction) -> Outcome:
    """1.0 or 0.0; unscorable where the ground truth is not a number."""
    answer = parse_number(item.response.rpartition("=")[2])
    return Scored(float(answer == truth), answer="" if answer is None else str(answer))
