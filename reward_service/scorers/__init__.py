"""The scorers that come with the package, by the names used in `reward.functions`.

Each is one small file with `score(item) -> Outcome`, pure and quick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from reward_service.outcomes import Outcome, RewardItem
from reward_service.scorers import arithmetic, auto, exact_match, gsm8k, strings

ItemScorer = Callable[[RewardItem], Outcome]

SCORERS: Mapping[str, ItemScorer] = MappingProxyType(
    {
        "auto": auto.score,
        "arithmetic": arithmetic.score,
        "exact_match": exact_match.score,
        "gsm8k": gsm8k.score,
        "strings": strings.score,
    }
)
