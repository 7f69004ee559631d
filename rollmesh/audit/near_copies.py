"""Texts that nearly repeat one another: sets of three words each, compared by minima of hashes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from zlib import crc32

import numpy as np

_SHINGLE = 3
# Minima of a signature, in bands: texts that agree in a band are compared.
_BANDS, _ROWS = 8, 3
_ALIKE = 0.8
# A hash for each: a constant is mixed in, and an odd factor spreads it.
_MIXED = np.random.default_rng(0).integers(0, 1 << 32, _BANDS * _ROWS, np.uint32)
_FACTOR = np.uint32(0x85EBCA6B)


def near_copies(texts: Sequence[Sequence[str]]) -> list[list[int]]:
    """Groups of texts of which at least four fifths of all word triples are equal to those of the group's first.

    Args:
        texts: the words of each.

    Returns:
        places of the texts of each group with several; a text is in one group at most.
    """
    shingles = [_shingles(words) for words in texts]
    buckets: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
    for place, found in enumerate(shingles):
        hashes = np.array([crc32(" ".join(shingle).encode("utf-8", "replace")) for shingle in found], np.uint32)
        minima = ((hashes[:, None] ^ _MIXED) * _FACTOR).min(axis=0).tolist()
        for band in range(_BANDS):
            buckets[band, tuple(minima[band * _ROWS : (band + 1) * _ROWS])].append(place)
    groups: list[list[int]] = []
    grouped: set[int] = set()
    for bucket in sorted(buckets.values(), key=len, reverse=True):
        left = [place for place in bucket if place not in grouped]
        if len(left) < 2:
            continue
        group = [place for place in left if _alike(shingles[left[0]], shingles[place])]
        if len(group) > 1:
            groups.append(group)
            grouped.update(group)
    return groups


def _shingles(words: Sequence[str]) -> frozenset[tuple[str, ...]]:
    return frozenset(tuple(words[start : start + _SHINGLE]) for start in range(max(1, len(words) - _SHINGLE + 1)))


def _alike(one: frozenset[tuple[str, ...]], other: frozenset[tuple[str, ...]]) -> bool:
    return len(one & other) >= _ALIKE * len(one | other)
