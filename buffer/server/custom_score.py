"""The order by a user's function: `buffer.order: package.module:function` or `path/to/file.py:function`.

The function gets a `GroupFacts` and answers a number; the highest is trained first. It runs in the front, once per
group and use: a priority set later counts at the next use. An exception that it raises ends the sampling with its
message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from rollmesh.buffer.policy.batch_selection import Candidate, GroupFacts
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.mesh.user_code import load_callable

Score = Callable[[GroupFacts], float]


def load_score(path: str) -> Score:
    """The function that a path names.

    Raises:
        ConfigError: it cannot be imported, or is not callable.
    """
    score: Score = load_callable(path, "buffer.order", ConfigError)
    return score


class ScoreCache:
    """Scores of the groups that are ready, as far as they have been asked for.

    Args:
        score: the user's function.
    """

    def __init__(self, score: Score) -> None:
        self._score = score
        self._scores: dict[str, float] = {}

    def missing(self, candidates: Sequence[Candidate]) -> list[str]:
        """Groups that need their facts; forgets groups that are no candidates any more."""
        ready = {candidate.group_id for candidate in candidates}
        self._scores = {group_id: score for group_id, score in self._scores.items() if group_id in ready}
        return [candidate.group_id for candidate in candidates if candidate.group_id not in self._scores]

    def add(self, facts: Iterable[GroupFacts]) -> None:
        """Scores groups.

        Raises:
            DataError: the function failed, or answered no finite number.
        """
        for group in facts:
            try:
                score = float(self._score(group))
            except Exception as error:  # the user's code may raise anything; it is named and handed on
                raise DataError(
                    f"buffer.order: the score of group {group.group_id} failed: {type(error).__name__}: {error}",
                    hint="correct the function and start the buffer again; nothing is lost",
                ) from error
            if not math.isfinite(score):
                raise DataError(f"buffer.order: the score of group {group.group_id} is {score}, not a finite number")
            self._scores[group.group_id] = score

    def ranked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The candidates that have a score, in its order."""
        return [replace(c, order=-self._scores[c.group_id]) for c in candidates if c.group_id in self._scores]
