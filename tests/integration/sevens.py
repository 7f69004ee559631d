"""A reward that few steps teach: sevens, whatever was asked."""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored


def score(items: Sequence[RewardItem]) -> list[Outcome]:
    """The share of sevens among a response's characters."""
    return [Scored(item.response.count("7") / max(1, len(item.response))) for item in items]
