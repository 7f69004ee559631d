"""The limit of consecutive batches that change nothing.

A gradient that is not finite is not followed, which is harmless now and then. If it happens in batch after batch
(weights that are NaN, a loss that overflows), the run would use up its data and train nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rollmesh.mesh.errors import DivergedError


class SkipLimit:
    """Counts, for every role, the batches in a row of which it took no step.

    Args:
        most: of them that a run outlives.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._in_a_row: Counter[str] = Counter()
        self._trained = False

    @property
    def healthy(self) -> bool:
        """True where the last batch trained something, and every role has changed with its own last one."""
        return self._trained and not self._in_a_row.total()

    def record(self, version: int, all_skipped: Mapping[str, bool]) -> None:
        """Counts a batch.

        Args:
            version: that was trained.
            all_skipped: by role with a step to take, whether none could be taken.

        Raises:
            DivergedError: too many in a row.
        """
        self._trained = bool(all_skipped)
        for role, skipped in all_skipped.items():
            self._in_a_row[role] = self._in_a_row[role] + 1 if skipped else 0
            if self._in_a_row[role] > self._most:
                raise DivergedError(
                    f"the {role}'s gradient was not finite in {self._in_a_row[role]} batches in a row, at last in that "
                    f"of version {version}; nothing was trained on them",
                    hint="see loss and grad_norm in metrics.jsonl; --from-checkpoint=best goes back to the best "
                    "checkpoint; learner.max_skipped is the bound",
                )
