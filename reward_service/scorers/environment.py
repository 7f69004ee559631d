"""The reward that an episode brings, from its environment or agent: `extra_info.environment_reward`."""

from __future__ import annotations

from collections.abc import Mapping

from rollmesh.reward_service.outcomes import Failed, Outcome, RewardItem, Scored

FIELD = "environment_reward"


def score(item: RewardItem) -> Outcome:
    """The components and their sum; `Failed("no_environment_reward")` without components."""
    rewards = item.extra_info.get(FIELD)
    if not isinstance(rewards, Mapping) or not rewards:
        return Failed(
            "no_environment_reward",
            "the episode has no reward of its own; let the environment give one, or name a scorer that judges the "
            "response (reward.functions)",
        )
    try:
        components = {str(name): float(value) for name, value in rewards.items()}
    except (TypeError, ValueError) as error:
        return Failed("bad_output", f"the environment's reward is not made of numbers: {error}")
    return Scored(sum(components.values()), components)
