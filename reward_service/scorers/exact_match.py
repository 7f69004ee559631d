"""Exact match: 1 if the response equals the ground truth (or one of several), white space around it aside."""

from __future__ import annotations

from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored, Unscorable


def accepted_answers(item: RewardItem) -> list[str]:
    """The ground truth as a list of accepted texts; empty when the row has none."""
    truth = item.ground_truth
    if truth is None:
        return []
    answers = truth if isinstance(truth, list) else [truth]
    return [str(answer).strip() for answer in answers]


def score(item: RewardItem) -> Outcome:
    """1.0 or 0.0; unscorable without a ground truth."""
    answers = accepted_answers(item)
    if not answers:
        return Unscorable("the row has no ground truth")
    return Scored(float(item.response.strip() in answers))
