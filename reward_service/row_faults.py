"""Rows that a scorer of the package cannot use, told without a response."""

from __future__ import annotations

from functools import cache

from rollmesh.mesh.config.scorers.code import NAMES as CODE
from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.code.rows import tests_of
from rollmesh.reward_service.outcomes import RewardItem
from rollmesh.reward_service.scorers import SCORERS, WITH_OPTION, ItemScorer, auto, takes_option
from rollmesh.reward_service.scorers.truths import TruthScorer


def fault_of(function: str, item: RewardItem) -> str:
    """The reason why a scorer finds every response to an item's prompt unscorable.

    Only the form of the truth is looked at: whether `math` can read the formula in it shows when it scores.

    Args:
        function: as in `reward.functions`.
        item: of the row; its response does not matter.

    Returns:
        The reason; empty where the row can be used, and for functions that are none of the package's scorers.
    """
    if function in CODE or (function == "auto" and item.data_source in auto.CODE_SOURCES):
        try:
            tests_of(item)
        except ValueError as error:
            return str(error)
        return ""
    scorer = auto.scorer_of(item.data_source) if function == "auto" else _scorer(function)
    return scorer.fault(item) if isinstance(scorer, TruthScorer) else ""


@cache
def _scorer(function: str) -> ItemScorer | None:
    if not takes_option(function):
        return SCORERS.get(function)
    name, _, option = function.partition(":")
    try:
        return WITH_OPTION[name](option)
    except RewardError:
        # The start of a run says so.
        return None
