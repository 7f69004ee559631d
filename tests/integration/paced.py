"""The demonstration's reward at a walking pace, for runs that last as long as a test looks at them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rollmesh.reward_service.outcomes import Outcome, RewardItem
from rollmesh.reward_service.scorers import arithmetic

_PAUSE_S = 0.5


def score(items: Sequence[RewardItem]) -> list[Outcome]:
    """As built in, after a pause."""
    time.sleep(_PAUSE_S)
    return [arithmetic.score(item) for item in items]
