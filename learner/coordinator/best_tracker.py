"""The best checkpoint: matches the checkpoint of an evaluated version with its result, whichever comes first.

The training thread writes the checkpoint at the version's own state. The result comes later, from a thread of the event
loop, when the training has usually passed the version. Invariant: a checkpoint is a candidate only while its round
runs. One that is written after its round has ended is judged at once, or left alone.
"""

from __future__ import annotations

import logging
import threading
from typing import Literal

from rollmesh.learner.checkpoint.best import Best, BestCheckpoint
from rollmesh.learner.evaluation.result import EvalResult
from rollmesh.mesh.trajectory.versions import PolicyVersion

log = logging.getLogger(__name__)
# A checkpoint is written while at most one more waits, so their rounds are among the last few.
_ENDED = 8


class BestTracker:
    """Decides which checkpoint is kept as the best.

    Args:
        file: claimed.
        metric: name as in `EvalResult.value`.
        direction: whether more or less of it is better.
    """

    def __init__(self, file: BestCheckpoint, *, metric: str, direction: Literal["max", "min"]) -> None:
        self._file = file
        self._metric = metric
        self._direction: Literal["max", "min"] = direction
        self._lock = threading.Lock()
        self._candidates: dict[PolicyVersion, str] = {}
        # Versions of the rounds that ended last, and their results if they had no checkpoint yet.
        self._ended: dict[PolicyVersion, EvalResult | None] = {}

    def checkpoint_written(self, policy: PolicyVersion, checkpoint: str) -> None:
        """Matches the checkpoint of a version that is, or was just, evaluated; may be repeated at any time.

        Raises:
            FencedError: another learner has taken over.
        """
        with self._lock:
            if policy in self._ended:
                result, self._ended[policy] = self._ended[policy], None
                if result is not None:
                    self._decide(result, checkpoint)
            elif policy not in self._candidates:
                self._candidates[policy] = checkpoint
                self._file.keep_candidate(checkpoint)

    def round_finished(self, result: EvalResult) -> None:
        """Matches the result of a finished round with its checkpoint.

        Raises:
            FencedError: another learner has taken over.
        """
        with self._lock:
            checkpoint = self._candidates.pop(result.policy, None)
            self._end(result.policy, result if checkpoint is None else None)
            if checkpoint is not None:
                self._decide(result, checkpoint)

    def round_abandoned(self, policy: PolicyVersion) -> None:
        """Drops the candidate of a round that was given up.

        Raises:
            FencedError: another learner has taken over.
        """
        with self._lock:
            self._end(policy, None)
            checkpoint = self._candidates.pop(policy, None)
            if checkpoint is not None:
                self._file.release(checkpoint)

    def _end(self, policy: PolicyVersion, result: EvalResult | None) -> None:
        # The version may be evaluated once more.
        self._ended.pop(policy, None)
        self._ended[policy] = result
        while len(self._ended) > _ENDED:
            del self._ended[next(iter(self._ended))]

    def _decide(self, result: EvalResult, checkpoint: str) -> None:
        value = result.value(self._metric)
        if value is None:
            log.warning("evaluation of version %s has no %s: see eval.metric", result.policy, self._metric)
            self._file.release(checkpoint)
            return
        policy = result.policy
        found = Best(
            checkpoint,
            policy.incarnation,
            policy.version,
            self._metric,
            self._direction,
            value,
            result.measured_by,
        )
        if self._file.record_value(found):
            log.info("version %s is the best so far: %s %.6g", policy, self._metric, value)
