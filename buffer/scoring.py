"""The order by a user's function: `buffer.order: package.module:function` or `path/to/file.py:function`.

The function gets a `GroupFacts` and answers a number; the highest is trained first. It runs in the front, once per
group and use: a priority set later counts at the next use. What it raises ends the sampling with its words.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from buffer.policy.order import Candidate, GroupFacts
from mesh.errors import ConfigError, DataError

Score = Callable[[GroupFacts], float]


def load_score(path: str) -> Score:
    """The function that a path names.

    Raises:
        ConfigError: it cannot be imported, or is not callable.
    """
    module_name, _, name = path.rpartition(":")
    try:
        if module_name.endswith(".py"):
            spec = importlib.util.spec_from_file_location(f"rollmesh_order_{Path(module_name).stem}", module_name)
            if spec is None or spec.loader is None:
                raise ConfigError(f"buffer.order: cannot read {module_name}")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
        score: Score = getattr(module, name)
    except (ImportError, OSError, SyntaxError, AttributeError) as error:
        raise ConfigError(
            f"buffer.order: cannot load {path}: {error}",
            hint="give `package.module:function`, or `file.py:function` with a path that the buffer can read",
        ) from error
    if not callable(score):
        raise ConfigError(f"buffer.order: {path} is not a function")
    return score


class Ranking:
    """Scores of the groups that are ready, as far as they have been asked for.

    Args:
        score: the user's function.
    """

    def __init__(self, score: Score) -> None:
        self._score = score
        self._scores: dict[str, float] = {}

    def unknown(self, candidates: Sequence[Candidate]) -> list[str]:
        """Groups whose facts are needed; forgets those that are no candidates any more."""
        ready = {candidate.group_id for candidate in candidates}
        self._scores = {group_id: score for group_id, score in self._scores.items() if group_id in ready}
        return [candidate.group_id for candidate in candidates if candidate.group_id not in self._scores]

    def learn(self, facts: Iterable[GroupFacts]) -> None:
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
                    hint="mend the function and start the buffer again; nothing is lost",
                ) from error
            if not math.isfinite(score):
                raise DataError(f"buffer.order: the score of group {group.group_id} is {score}, not a finite number")
            self._scores[group.group_id] = score

    def ranked(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Those with a score, placed by it."""
        return [replace(c, order=-self._scores[c.group_id]) for c in candidates if c.group_id in self._scores]
