"""Sources by turns: which one has a place of an endless sequence, in given shares.

Place `k`, from 0, has the number `(step * k + offset) mod total`, where `total` is the sum of all shares. Each source
owns as many successive numbers as its share. `step` has no divisor in common with `total`, so that any `total`
successive places have each source exactly as often as its share. `step / total` is near the golden ratio, so that the
places of a source lie evenly. Such sequences are named after Kronecker. Source: Niederreiter, "Random Number
Generation and Quasi-Monte Carlo Methods", 1992, chapter 3.

Invariant: all is integer arithmetic in closed form. No place needs the places before it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate

_GOLDEN = (math.sqrt(5) - 1) / 2
# Weights are fractions of at most this denominator.
_FINEST = 1_000_000
# Steps that are compared, to each side of the golden ratio.
_CANDIDATES = 100


class Interleaving:
    """Maps places to sources.

    Args:
        shares: of each source, at least 0 and not all 0.
        seed: of the offset.
    """

    def __init__(self, shares: Sequence[int], *, seed: int) -> None:
        divisor = math.gcd(*shares)
        self._ends = list(accumulate(share // divisor for share in shares))
        self._total = self._ends[-1]
        self._step = _even_step(self._total)
        self._offset = seed % self._total

    @classmethod
    def weighted(cls, weights: Sequence[float], *, seed: int) -> Interleaving:
        """One whose shares are proportional to positive weights, to six digits."""
        total = math.fsum(weights)
        fractions = [Fraction(weight / total).limit_denominator(_FINEST) for weight in weights]
        common = math.lcm(*(fraction.denominator for fraction in fractions))
        # The least share is one part of a million: a source with a weight is never left out.
        if common > _FINEST or not all(fractions):
            return cls([round(_FINEST * weight / total) or 1 for weight in weights], seed=seed)
        return cls([int(fraction * common) for fraction in fractions], seed=seed)

    def source(self, place: int) -> int:
        """The source of a place."""
        return bisect.bisect_right(self._ends, (self._step * place + self._offset) % self._total)

    def count(self, source: int, places: int) -> int:
        """The number of a source's places among the first `places`."""
        begin = self._ends[source - 1] if source else 0
        return self._below(self._ends[source], places) - self._below(begin, places)

    def _below(self, bound: int, places: int) -> int:
        """The number of places with a number below a bound: the carries that the bound takes away."""
        return _floor_sum(places, self._total, self._step, self._offset) - _floor_sum(
            places, self._total, self._step, self._offset - bound
        )


@lru_cache(256)
def _even_step(total: int) -> int:
    """A step near `total` times the golden ratio that has no divisor in common with `total`.

    Among those near it is the one with the least sum of partial quotients of `step / total`. That sum bounds how far
    any source can be ahead of its share (Niederreiter, theorem 3.4).
    """
    ideal = round(total * _GOLDEN)
    near = range(max(1, ideal - _CANDIDATES), min(total, ideal + _CANDIDATES) + 1)
    return min((step for step in near if math.gcd(step, total) == 1), key=lambda step: _quotients(step, total))


def _quotients(step: int, total: int) -> int:
    """The sum of the partial quotients of the continued fraction of `step / total`."""
    found = 0
    while step:
        quotient, rest = divmod(total, step)
        found += quotient
        total, step = step, rest
    return found


def _floor_sum(count: int, modulus: int, step: int, offset: int) -> int:
    """The sum of `(step * k + offset) // modulus` over k = 0 .. count - 1, by the Euclidean algorithm.

    Source: Graham, Knuth, Patashnik, "Concrete Mathematics", sec. 3.5, whose sums it divides step by step.
    """
    total = 0
    while count > 0:
        quotient, step = divmod(step, modulus)
        total += quotient * (count * (count - 1) // 2)
        quotient, offset = divmod(offset, modulus)
        total += quotient * count
        last = step * count + offset
        # Lattice points below the straight path, counted along the other axis.
        count, offset = divmod(last, modulus)
        modulus, step = step, modulus
    return total
