"""The held-out rows that are asked: of every source its first ones, and as many of each as of the others."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def asked_rows(sizes: Sequence[int], limit: int | None) -> list[int]:
    """Numbers of the rows that are asked, among the rows of all sources one after the other.

    A source with fewer rows than its share leaves the rest to the others. With a larger limit the same rows are asked,
    and further ones.

    Args:
        sizes: rows of each source.
        limit: `eval.rows`; None: all are asked.
    """
    left = sum(sizes) if limit is None else limit
    counts = [0] * len(sizes)
    smallest_first = sorted(range(len(sizes)), key=sizes.__getitem__)
    for done, source in enumerate(smallest_first):
        counts[source] = min(sizes[source], left // (len(sizes) - done))
        left -= counts[source]
    starts = accumulate(sizes, initial=0)
    return [row for start, count in zip(starts, counts, strict=False) for row in range(start, start + count)]
