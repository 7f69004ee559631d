"""The part of `auto` for sources of programs: verl's rule, the share of the first ten cases that pass."""

from __future__ import annotations

from rollmesh.mesh.config.reward import RewardSection
from rollmesh.reward_service.code.scorer import Code
from rollmesh.reward_service.outcomes import Outcome, RewardItem
from rollmesh.reward_service.scorers import environment

_CASES = 10


class AutomaticCode(Code):
    """The scorer for rows of such a source; an episode that brings a reward of its own has been judged by it."""

    def __init__(self, reward: RewardSection) -> None:
        super().__init__(reward, "auto", fraction=True, cases=_CASES)

    async def __call__(self, item: RewardItem) -> Outcome:
        """The outcome of one item."""
        if environment.FIELD in item.extra_info:
            return environment.score(item)
        return await super().__call__(item)
