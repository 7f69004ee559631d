"""Curricula: a user's function sets the weights of the sources while a run proceeds.

The function is asked once for every `SEGMENT` successive prompts. Invariant: it is pure, so that the order of the
prompts stays a pure function of (seed, data, function, ordinal). After a restart it is asked again from the first
segment on. So it knows how many prompts came before, and nothing of rewards or of time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rollmesh.learner.data.interleaving import Interleaving
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.user_code import load_callable, raised_by_user

SEGMENT = 64
"""Prompts between two questions to the function."""
_SHARES = 1_000_000
# The sum of weights may have this much, so that no product with it overflows.
_LARGEST_SUM = 1e100


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of the data that a curriculum decides by.

    Attributes:
        prompts: that came before.
        taken: by source, how many of these were its own; above its rows it is in a later epoch.
        rows: of each source.
    """

    prompts: int
    taken: Mapping[str, int]
    rows: Mapping[str, int]


Curriculum = Callable[[Progress], Mapping[str, float]]
"""Progress -> weight by name of source; those left out have 0."""


def load_curriculum(path: str) -> Curriculum:
    """The function that `data.curriculum` names.

    Raises:
        DataError: it names none, or importing it fails.
    """
    return load_callable(path, "data.curriculum", DataError)


class CurriculumTurns:
    """Turns in shares that a curriculum changes from segment to segment.

    Args:
        curriculum: the function.
        rows: of each source, by name, in the order of the sources.
        seed: of the interleaving.
    """

    def __init__(self, curriculum: Curriculum, rows: Mapping[str, int], *, seed: int) -> None:
        self._curriculum = curriculum
        self._rows = MappingProxyType(dict(rows))
        self._seed = seed
        self._shares: list[Interleaving] = []
        self._taken: list[tuple[int, ...]] = [(0,) * len(rows)]
        """Ordinals of each source before each segment, and after the last one that is known."""

    def locate(self, ordinal: int) -> tuple[int, int]:
        """(source, number of its ordinals up to this one, which counts).

        Raises:
            DataError: the function raises, or gives no weights.
        """
        place = ordinal - 1
        segment = place // SEGMENT
        while len(self._shares) <= segment:
            self._decide()
        shares = self._shares[segment]
        source = shares.source(place)
        within = shares.count(source, ordinal) - shares.count(source, segment * SEGMENT)
        return source, self._taken[segment][source] + within

    def _decide(self) -> None:
        begin = len(self._shares) * SEGMENT
        taken = self._taken[-1]
        weights = self._ask(Progress(begin, dict(zip(self._rows, taken, strict=True)), self._rows))
        shares = Interleaving(weights, seed=self._seed)
        counts = [0] * len(taken)
        for place in range(begin, begin + SEGMENT):
            counts[shares.source(place)] += 1
        self._shares.append(shares)
        self._taken.append(tuple(before + more for before, more in zip(taken, counts, strict=True)))

    def _ask(self, progress: Progress) -> list[int]:
        when = f"data.curriculum, after {progress.prompts} prompts"
        hint = "it takes the progress and returns {name of a source: weight}, weights at least 0 and not all 0"
        try:
            given: Any = self._curriculum(progress)
        except BaseException as error:  # a user's function may raise anything, SystemExit included
            if not raised_by_user(error):
                raise
            raise DataError(f"{when}: it raised {type(error).__name__}: {error}", hint=hint) from error
        if not isinstance(given, Mapping):
            raise DataError(f"{when}: it returned {type(given).__name__}", hint=hint)
        if unknown := [name for name in given if name not in self._rows]:
            raise DataError(f"{when}: no source is called {unknown[0]!r}: {', '.join(self._rows)}", hint=hint)
        return _as_shares(given, self._rows, when, hint)


def _as_shares(given: Mapping[str, Any], names: Sequence[str] | Mapping[str, int], when: str, hint: str) -> list[int]:
    try:
        weights = [float(given.get(name, 0.0)) for name in names]
        total = math.fsum(weights)
    except (TypeError, ValueError) as error:
        raise DataError(f"{when}: a weight is no number: {error}", hint=hint) from error
    except OverflowError as error:
        raise DataError(f"{when}: its weights are too large: {error}", hint=hint) from error
    if not 0 < total <= _LARGEST_SUM or min(weights) < 0:
        raise DataError(f"{when}: it returned the weights {weights}", hint=hint)
    return [round(_SHARES * weight / total) or int(weight > 0) for weight in weights]
