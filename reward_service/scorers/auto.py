"""Picks the scorer by the name of the data_source; a source it does not know is an error, not a zero.

Names are whole names, in any case: a source that only sounds like mathematics may be something else. An episode that
brings a reward of its own has been judged by it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from rollmesh.reward_service.outcomes import Failed, Outcome, RewardItem
from rollmesh.reward_service.scorers import (
    arithmetic,
    environment,
    exact_match,
    gsm8k,
    qa,
    strings,
)
from rollmesh.reward_service.scorers.mathematics import math_dapo, math_value

# Scorer -> the data_sources that are its: those of verl's datasets, of their publishers, and of this package.
_NAMES: Mapping[str, str] = {
    "gsm8k": "gsm8k openai/gsm8k",
    "math": "math math500 math_500 math-500 HuggingFaceH4/MATH-500 lighteval/MATH DigitalLearningGmbH/MATH-lighteval "
    "EleutherAI/hendrycks_math numina_aops_forum numina_synthetic_math numina_amc_aime numina_synthetic_amc "
    "numina_cn_k12 numina_olympiads AI-MO/NuminaMath-CoT AI-MO/NuminaMath-TIR",
    "math_dapo": "math_dapo math_dapo_reasoning BytedTsinghua-SIA/DAPO-Math-17k BytedTsinghua-SIA/AIME-2024 aime "
    "aime24 aime25 aime26 aime2024 aime2025 aime2026 aime_2024 aime_2025 aime_2026 HuggingFaceH4/aime_2024 "
    "Maxwell-Jia/AIME_2024 math-ai/aime24 math-ai/aime25 opencompass/AIME2025 yentinglin/aime_2025",
    "qa": "searchR1_nq searchR1_triviaqa searchR1_popqa searchR1_hotpotqa searchR1_2wikimultihopqa searchR1_musique "
    "searchR1_bamboogle",
    "arithmetic": "arithmetic addition demo/arithmetic",
    "strings": "strings demo/strings",
    "exact_match": "exact_match",
    "code_fraction": "codecontests apps codeforces taco livecodebench",
}


def _in_sandbox(item: RewardItem) -> Outcome:
    # With a sandbox, `reward_service.configured` puts another function in for these sources.
    return Failed(
        "no_scorer",
        f"programs of data_source {item.data_source!r} need a sandbox: write the name in small letters, or name "
        "code_fraction in reward.by_data_source",
    )


_SCORERS: Mapping[str, Callable[[RewardItem], Outcome]] = {
    "gsm8k": gsm8k.score,
    "math": math_value.score,
    "math_dapo": math_dapo.score,
    "qa": qa.score,
    "arithmetic": arithmetic.score,
    "strings": strings.score,
    "exact_match": exact_match.score,
    "code_fraction": _in_sandbox,
}
SOURCES: Mapping[str, str] = MappingProxyType(
    {source: scorer for scorer, sources in _NAMES.items() for source in sources.split()}
)
"""data_source -> name of its scorer."""
CODE_SOURCES = frozenset(_NAMES["code_fraction"].split())
"""Sources whose responses are programs."""
SCORERS = tuple(_SCORERS)
"""Names of the scorers that sources lead to, besides `environment`."""
_BY_NAME = {source.lower(): _SCORERS[scorer] for source, scorer in SOURCES.items()}


def scorer_of(data_source: str) -> Callable[[RewardItem], Outcome] | None:
    """The scorer of a source; None for an unknown one."""
    return _BY_NAME.get(data_source.lower())


def score(item: RewardItem) -> Outcome:
    """The chosen scorer's outcome; `Failed("no_scorer")` for an unknown source."""
    if environment.FIELD in item.extra_info:
        return environment.score(item)
    if (scorer := scorer_of(item.data_source)) is not None:
        return scorer(item)
    close = difflib.get_close_matches(item.data_source[:100].lower(), list(_BY_NAME), n=1, cutoff=0.8)
    return Failed(
        "no_scorer",
        f"no built-in scorer for data_source {item.data_source!r}{f' (do you mean {close[0]!r}?)' if close else ''}; "
        f"name its scorer: reward.by_data_source, or reward.functions for all. auto knows: {', '.join(SOURCES)}",
    )
