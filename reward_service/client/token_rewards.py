"""Rewards of single tokens, from what a server gave to tokens or to parts of the text. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rollmesh.protos import reward_pb2


def token_rewards(
    scored: reward_pb2.Scored, token_ends: Callable[[], Sequence[int]], mask: NDArray[np.uint8]
) -> NDArray[np.float32] | None:
    """Rewards per token, in addition to the total: a part's value goes to the last token of the part.

    A value whose token the policy did not sample goes to the sampled one before it, or else to the first one. Values of
    one token are added.

    Args:
        scored: checked: one value per token, or spans within the text, or neither.
        token_ends: gives for each token the characters of the text up to its end; asked only for spans.
        mask: uint8 [T], 1 where the policy sampled the token.

    Returns:
        float32 [T]; None where there are none.
    """
    if scored.per_token:
        places, values = np.arange(len(mask)), np.fromiter(scored.per_token, np.float32, len(mask))
    elif scored.spans:
        ends = token_ends()
        places = np.array([min(bisect_left(ends, span.end), len(mask) - 1) for span in scored.spans])
        values = np.array([span.value for span in scored.spans], np.float32)
    else:
        return None
    sampled = np.flatnonzero(mask)
    if not len(sampled):
        return None
    before = np.searchsorted(sampled, places, side="right") - 1
    rewards = np.zeros(len(mask), np.float32)
    np.add.at(rewards, sampled[np.maximum(before, 0)], values)
    return rewards
