"""The choice of sequences for one pass of a model. Pure.

Invariants: the sequence that came first is in the next batch, so none waits without end. A batch has no more tokens
than allowed, padding included, unless it is one sequence alone. At most half of a batch is padding.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

# The longest sequence of a batch over its shortest, at most.
_SPREAD = 2


@dataclass(frozen=True, slots=True)
class Waiting:
    """A sequence that waits.

    Attributes:
        key: its number.
        tokens: its length.
        since: monotonic time, in seconds.
        alone: it may harm others, and gets a pass of its own.
    """

    key: int
    tokens: int
    since: float
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """The next batch, or the time for which to wait for one.

    Attributes:
        keys: of its sequences; empty: none is due yet.
        wait_s: seconds until the next look, where none is due.
    """

    keys: tuple[int, ...] = ()
    wait_s: float = 0.0


def next_batch(waiting: Sequence[Waiting], now: float, *, max_tokens: int, max_wait_s: float) -> Choice:
    """The sequences that go next: those nearest in length to the one that came first.

    Args:
        waiting: in the order of their coming, not empty.
        now: monotonic time.
        max_tokens: most tokens of a batch, padding included.
        max_wait_s: seconds for which the first one waits for others, unless the batch is full before.
    """
    first = waiting[0]
    if first.alone:
        return Choice((first.key,))
    others = sorted((each for each in waiting if not each.alone), key=lambda each: each.tokens)
    begin = bisect_left(others, first.tokens, key=lambda each: each.tokens)
    begin = next(place for place in range(begin, len(others)) if others[place] is first)
    end, full = begin + 1, False
    while not full and (begin > 0 or end < len(others)):
        below = first.tokens - others[begin - 1].tokens if begin > 0 else None
        above = others[end].tokens - first.tokens if end < len(others) else None
        take_below = above is None or (below is not None and below <= above)
        shortest = others[begin - take_below].tokens
        longest = others[end - take_below].tokens
        if longest > _SPREAD * shortest:
            break
        full = longest * (end - begin + 1) > max_tokens
        if not full:
            begin, end = begin - take_below, end + (not take_below)
    left_s = first.since + max_wait_s - now
    full = full or others[end - 1].tokens * (end - begin + 1) > max_tokens
    if left_s > 0 and not full:
        return Choice(wait_s=left_s)
    return Choice(tuple(each.key for each in others[begin:end]))
