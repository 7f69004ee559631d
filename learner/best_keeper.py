"""Brings together the checkpoint of an evaluated version and what the evaluation found, whichever comes first.

The checkpoint is written by the training thread at the version's own state; the result comes from a thread of the
event loop, as a rule while the training is versions further.
"""

from __future__ import annotations

import logging
import threading
from typing import Literal

from learner.checkpoint.best import Best, BestCheckpoint
from learner.evaluation import EvalResult
from mesh.versions import PolicyVersion

_log = logging.getLogger(__name__)


class BestKeeper:
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
        self._held: dict[PolicyVersion, str] = {}
        # The last result that came before its checkpoint.
        self._early: EvalResult | None = None

    def written(self, policy: PolicyVersion, checkpoint: str) -> None:
        """A checkpoint of a version that is, or was just, evaluated is there; telling it twice is harmless.

        Raises:
            FencedError: another learner has taken over.
        """
        with self._lock:
            early = self._early
            if early is not None and early.policy == policy:
                self._early = None
                self._decide(early, checkpoint)
            elif policy not in self._held:
                self._held[policy] = checkpoint
                self._file.hold(checkpoint)

    def result(self, result: EvalResult) -> None:
        """A round has finished.

        Raises:
            FencedError: another learner has taken over.
        """
        with self._lock:
            checkpoint = self._held.pop(result.policy, None)
            if checkpoint is None:
                self._early = result
            else:
                self._decide(result, checkpoint)

    def missed(self, policy: PolicyVersion) -> None:
        """A round was given up.

        Raises:
            FencedError: another learner has taken over.
        """
        with self._lock:
            checkpoint = self._held.pop(policy, None)
            if checkpoint is not None:
                self._file.let_go(checkpoint)

    def _decide(self, result: EvalResult, checkpoint: str) -> None:
        value = result.value(self._metric)
        if value is None:
            _log.warning("evaluation of version %s has no %s: see eval.metric", result.policy, self._metric)
            self._file.let_go(checkpoint)
            return
        policy = result.policy
        found = Best(checkpoint, policy.incarnation, policy.version, self._metric, self._direction, value)
        if self._file.measured(found):
            _log.info("version %s is the best so far: %s %.6g", policy, self._metric, value)
