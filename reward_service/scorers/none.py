"""No judgement: every response has the reward 0, where only the responses are wanted (`rollmesh generate`)."""

from __future__ import annotations

from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored


def score(_item: RewardItem) -> Outcome:
    """0.0, whatever the response."""
    return Scored(0.0)
