"""The scorers that come with the package, by the names used in `reward.functions`.

Each is one small file with `score(item) -> Outcome`, pure.

Those in `LINEAR` may share a process with a service: their time is linear in the length of the texts, whatever a model
writes. They search and replace fixed words, compare numbers as decimals, count, or look at no more than the last few
hundred characters. Their regular expressions never try a part of a long text again from another place. `math`
gives the text to a computer algebra system, for which `9^{9^{9^{9}}}` is a number to compute. So it runs in worker
processes, which can be killed, and so does `auto` for the sources that it hands to `math`. A scorer that is not proven
linear does not belong into `LINEAR`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from rollmesh.reward_service.outcomes import Outcome, RewardItem
from rollmesh.reward_service.scorers import (
    arithmetic,
    auto,
    environment,
    exact_match,
    graders,
    gsm8k,
    gsm8k_text,
    math_dapo,
    math_string,
    math_value,
    none,
    qa,
    strings,
)

ItemScorer = Callable[[RewardItem], Outcome]

SCORERS: Mapping[str, ItemScorer] = MappingProxyType(
    {
        "auto": auto.score,
        "arithmetic": arithmetic.score,
        "environment": environment.score,
        "exact_match": exact_match.score,
        "gsm8k": gsm8k.score,
        "gsm8k_flexible": gsm8k_text.score_flexible,
        "gsm8k_strict": gsm8k_text.score_strict,
        "math": math_value.score,
        "math_dapo": math_dapo.score,
        "math_string": math_string.score,
        "none": none.score,
        "qa": qa.score,
        "strings": strings.score,
    }
)

LINEAR = frozenset(
    {
        "arithmetic",
        "environment",
        "exact_match",
        "gsm8k",
        "gsm8k_flexible",
        "gsm8k_strict",
        "math_dapo",
        "math_string",
        "none",
        "qa",
        "strings",
    }
)


def is_linear(name: str, data_source: str) -> bool:
    """True if a scorer's time is linear for items of a source; see above."""
    return name in LINEAR or (name == "auto" and auto.scorer_of(data_source) is not math_value.score)


def reads_mathematics(name: str) -> bool:
    """True if a scorer hands items to math-verify, all or those of some sources."""
    return name in ("auto", "math")


def prepare(name: str) -> None:
    """Loads and tries the imports of a scorer's first call, so that no call is charged for that.

    Raises:
        RewardError: it grades otherwise here than where it was tested.
    """
    if reads_mathematics(name):
        graders.self_test()
