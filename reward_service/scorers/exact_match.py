"""Exact match: 1 if the response equals the ground truth (or one of several), white space around it aside."""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored
from rollmesh.reward_service.scorers.truths import compares_with, texts


@compares_with(texts)
def score(item: RewardItem, truths: Sequence[str]) -> Outcome:
    """1.0 or 0.0; unscorable without a text or a number, or a list of them."""
    answer = item.response.strip()
    right = answer in truths
    return Scored(float(right), answer=truths[0] if right else answer)
