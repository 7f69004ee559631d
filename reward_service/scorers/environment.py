"""The reward that an episode brings, from its environment or agent: `extra_info.environment_reward`.

Where it is the sum of rewards of steps (`extra_info.environment_steps`, one for each turn), each stands at its turn.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollmesh.reward_service.outcomes import Failed, Outcome, RewardItem, Scored, SpanValue

FIELD, STEPS = "environment_reward", "environment_steps"


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
        steps = [float(value) for value in item.extra_info.get(STEPS) or ()]
    except (TypeError, ValueError) as error:
        return Failed("bad_output", f"the environment's reward is not made of numbers: {error}")
    # The last turn's stands at the last token already.
    spans = tuple(SpanValue(0, 0, value, turn, of_total=True) for turn, value in enumerate(steps[:-1], 1) if value)
    return Scored(sum(components.values()), components, spans=spans)
