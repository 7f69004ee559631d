"""Picks the scorer by what the data_source is called; a source it does not know is an error, not a zero.

An episode that brings a reward of its own has been judged by it.
"""

from __future__ import annotations

from collections.abc import Callable

from rollmesh.reward_service.outcomes import Failed, Outcome, RewardItem
from rollmesh.reward_service.scorers import (
    arithmetic,
    environment,
    exact_match,
    gsm8k,
    math_dapo,
    math_value,
    qa,
    strings,
)

# First match wins: part of the data_source's name, scorer.
_RULES = (
    ("gsm8k", gsm8k.score),
    ("arithmetic", arithmetic.score),
    ("addition", arithmetic.score),
    ("math_dapo", math_dapo.score),
    ("aime", math_dapo.score),
    ("math", math_value.score),
    ("numina", math_value.score),
    ("searchr1", qa.score),
    ("string", strings.score),
    ("exact_match", exact_match.score),
)


def scorer_of(data_source: str) -> Callable[[RewardItem], Outcome] | None:
    """The scorer of a source; None for an unknown one."""
    name = data_source.lower()
    return next((scorer for part, scorer in _RULES if part in name), None)


def score(item: RewardItem) -> Outcome:
    """The chosen scorer's outcome; `Failed("no_scorer")` for an unknown source."""
    if environment.FIELD in item.extra_info:
        return environment.score(item)
    if (scorer := scorer_of(item.data_source)) is not None:
        return scorer(item)
    known = ", ".join(part for part, _ in _RULES)
    return Failed(
        "no_scorer",
        f"no built-in scorer for data_source {item.data_source!r} (known by name: {known}); "
        "set reward.functions or reward.by_data_source",
    )
