"""The alarm for generators whose log-probs differ from the learner's at the same version.

Bounds hold for means over `_LEAST_TOKENS` tokens or more. Smaller batches are judged together, so that a single
unlikely token ends no run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from rollmesh.learner.distributed.mismatch import Mismatch
from rollmesh.mesh.config.learner import MismatchSection
from rollmesh.mesh.errors import MismatchError
from rollmesh.mesh.trajectory.episode_metrics import CALLS_CONSTRAINED
from rollmesh.protos import trajectory_pb2

log = logging.getLogger(__name__)
_LEAST_TOKENS = 256
# Batches without a token to compare, after which a warning is logged.
_MANY_BATCHES = 20
_LOOK_AT = (
    "compare the weights with `rollmesh weights verify` while the run is in progress, then dtype, quantization and "
    "sampling settings of the engine: docs/operations.md, Log-probs that differ"
)


class MismatchGuard:
    """Judges batch after batch.

    Args:
        bounds: that warn and that end the run.
    """

    def __init__(self, bounds: MismatchSection) -> None:
        self._bounds = bounds
        self._seen = Mismatch()
        # The largest excess that was reported, as a multiple of the bound; 0 where the last judgement was within it.
        self._reported = 0.0
        self._without = 0

    def check(self, version: int, found: Mismatch | None) -> str:
        """Judges a batch.

        Args:
            version: that was trained.
            found: in the batch; None where the policy was not computed.

        Returns:
            A warning: when a bound is exceeded, and whenever the excess has doubled. Else nothing.

        Raises:
            MismatchError: a bound that ends the run is exceeded.
        """
        if found is None:
            return ""
        self._count(found)
        self._seen += found
        if self._seen.tokens < _LEAST_TOKENS:
            return ""
        seen, self._seen = self._seen, Mismatch()
        bounds = self._bounds
        if exceeded := _exceeded(seen, bounds, "stop", "stop_kl"):
            raise MismatchError(f"{_text(version, seen)}, which is over {exceeded}", hint=_LOOK_AT)
        excess = max(_ratio(seen.log_prob_diff, bounds.warn), _ratio(seen.k3_kl, bounds.warn_kl))
        if excess <= 1.0:
            self._reported = 0.0
            return ""
        if excess < 2 * self._reported:
            return ""
        self._reported = excess
        return f"{_text(version, seen)}, which is over {_exceeded(seen, bounds, 'warn', 'warn_kl')}; {_LOOK_AT}"

    def _count(self, found: Mismatch) -> None:
        """Warns once that no token can be compared."""
        if found.tokens or self._without < 0:
            self._without = -1
            return
        self._without += 1
        if self._without == _MANY_BATCHES:
            log.info(
                "log-probs of learner and generators could not be compared in the first %d batches: every response "
                "has tokens of other versions than the one that trained it (buffer.max_staleness=0 prevents that)",
                _MANY_BATCHES,
            )


def can_be_judged(members: Iterable[trajectory_pb2.MemberMeta]) -> bool:
    """True for a batch without tokens that were drawn under a grammar: the learner's log-probs are not of these alone.

    Args:
        members: of the batch.
    """
    return not any(meta.metrics.get(CALLS_CONSTRAINED) for meta in members)


def _text(version: int, seen: Mismatch) -> str:
    return (
        f"log-probs of learner and generators, both of version {version}, differ by {seen.log_prob_diff:.3g} nats per "
        f"token on average (k3 KL {seen.k3_kl:.3g}, {seen.tokens} tokens)"
    )


def _ratio(value: float, bound: float | None) -> float:
    return 0.0 if bound is None else value / bound


def _exceeded(seen: Mismatch, bounds: MismatchSection, *keys: str) -> str:
    """The first bound that is exceeded, with its value; empty without."""
    for key, value in zip(keys, (seen.log_prob_diff, seen.k3_kl), strict=True):
        if _ratio(value, getattr(bounds, key)) > 1.0:
            return f"learner.mismatch.{key} ({getattr(bounds, key):g})"
    return ""
