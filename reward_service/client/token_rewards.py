"""Rewards of single tokens, from what a server gave to tokens or to parts of the text. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollmesh.mesh.trajectory.payload_codec import Trajectory
from rollmesh.protos import reward_pb2

# Bits of a sum that float32 holds exactly, less one for each sign and for rounding.
_BITS = 22


class TokenEnds(Protocol):
    """Where tokens end; asked only for spans, and may take a while."""

    def token_ends(self) -> Sequence[int]:
        """For each token the characters of the response's text up to its end."""
        ...

    def turn_ends(self, turn: int) -> Sequence[int]:
        """For each token of a turn, from 1, the characters of the turn's text up to its end."""
        ...


def token_rewards(scored: reward_pb2.Scored, ends: TokenEnds, sampled: Trajectory) -> NDArray[np.float32] | None:
    """Rewards per token, in addition to the total: a part's value goes to the last token of the part.

    A value whose token the policy did not sample goes to the sampled one before it, or else to the first one. Values of
    one token are added. A value that is of the total is taken from the last sampled token. All of these add up to 0,
    also in float32 and in any order, so that the sum of a response stays its total.

    Args:
        scored: checked: perhaps one value per token; spans within the text, or within turns that there are.
        ends: of the tokens.
        sampled: the tokens.

    Returns:
        float32 [T]; None where there are none.
    """
    if not (scored.per_token or scored.spans):
        return None
    trained = np.flatnonzero(sampled.response_mask)
    if not len(trained):
        return None

    def summed(places: Sequence[int], values: Sequence[float]) -> NDArray[np.float64]:
        before = np.searchsorted(trained, places, side="right") - 1
        rewards = np.zeros(len(sampled))
        np.add.at(rewards, trained[np.maximum(before, 0)], values)
        return rewards

    turns = sampled.turns
    spans = [(_place(span, ends, turns, len(sampled)), span) for span in scored.spans]
    moved = _exact(summed(*_split(spans, of_total=True)))
    moved[trained[-1]] -= moved.sum()
    added = summed(*_split(spans, of_total=False)) + moved
    if scored.per_token:
        added += summed(range(len(sampled)), scored.per_token)
    return added.astype(np.float32)


def _split(
    spans: Sequence[tuple[int, reward_pb2.SpanReward]], *, of_total: bool
) -> tuple[Sequence[int], Sequence[float]]:
    """Tokens and values of the spans of one kind."""
    chosen = [(place, span.value) for place, span in spans if span.of_total == of_total]
    return [place for place, _ in chosen], [value for _, value in chosen]


def _place(span: reward_pb2.SpanReward, ends: TokenEnds, turns: Sequence[tuple[int, int]], tokens: int) -> int:
    """The token that completes a part's last character."""
    if not span.turn:
        return min(bisect_left(ends.token_ends(), span.end), tokens - 1)
    begin, end = turns[span.turn - 1]
    inside = bisect_left(ends.turn_ends(span.turn), span.end) if span.end else end
    return min(begin + inside, end - 1)


def _exact(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values, rounded so that each sum of some of them is one in float32: to 2**-`_BITS` of their size in all."""
    size = float(np.abs(values).sum())
    if not size:
        return values
    grid = math.ldexp(1.0, math.frexp(size)[1] - _BITS)
    return np.round(values / grid) * grid
