"""The scorers that come with the package, by the names used in `reward.functions`.

Each is one small file with `score(item) -> Outcome`, pure and quick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from reward_service.outcomes import Outcome, RewardItem
from reward_service.scorers import (
    arithmetic,
    auto,
    environment,
    exact_match,
    gsm8k,
    gsm8k_text,
    math_dapo,
    math_string,
    math_value,
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
        "qa": qa.score,
        "strings": strings.score,
    }
)
