"""The pace of checkpoints: says once where writing them takes too much of the time in which steps are trained.

Training continues while a checkpoint is written, and is slower: docs/operations.md reckons by how much.
"""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)
_MOST = 1 / 3
# A tiny model's checkpoints come as they may.
_WORTH_SAYING_S = 10.0
_ADVISED = 12
"""Intervals of this many times the write cost less than 5 % where steps take 2.4 times as long meanwhile."""


class WritePace:
    """Compares the time that checkpoints take with the time between them, for those that the schedule asks for.

    Args:
        began: when the training began, by the monotonic clock.
    """

    def __init__(self, began: float) -> None:
        self._last = began
        self._interval_s = 0.0
        self._said = False

    def due(self, at: float) -> None:
        """Records that the schedule asks for a checkpoint.

        Args:
            at: by the monotonic clock.
        """
        self._last, self._interval_s = at, at - self._last

    def written(self, took_s: float) -> None:
        """Records that a checkpoint of the schedule is committed, this many seconds after its step."""
        if self._said or took_s < _WORTH_SAYING_S or not 0 < _MOST * self._interval_s < took_s:
            return
        self._said = True
        log.warning(
            "a checkpoint takes %.0f s to be written, and one is due every %.0f s: steps are slower meanwhile. Set "
            "checkpoint.every_s to %.0f or more, raise eval.every_steps where evaluations ask for checkpoints, or give "
            "run.dir a faster disk",
            took_s,
            self._interval_s,
            _ADVISED * took_s,
        )
