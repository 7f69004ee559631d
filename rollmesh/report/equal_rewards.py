"""Steps in which every response got the same reward: there is nothing to learn from them."""

from __future__ import annotations

from collections.abc import Sequence

LOWEST, HIGHEST = "critic/score/min", "critic/score/max"
"""Metrics of a step: the rewards of its responses."""
REMEDY = (
    "`rollmesh samples RUN` shows what the model writes. Does the reward find the answer in that form? Else easier "
    "prompts (harder ones if all are solved), or supervised steps before (`rollmesh sft`)"
)


def equal_rewards(lowest: Sequence[float], highest: Sequence[float], of: str) -> str:
    """A sentence about steps whose responses all got one reward; empty where rewards differ, and without steps.

    Args:
        lowest, highest: reward of each step.
        of: the steps, in words.
    """
    if not len(lowest) or not len(highest) or min(lowest) != max(highest):
        return ""
    return f"every response of {of} got the same reward, {min(lowest):g}: nothing can be learned"
