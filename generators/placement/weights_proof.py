"""Proof that an engine serves the weights that were published, before it generates with them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollmesh.generators.engines.types import ServedWeights
from rollmesh.generators.weights.announced_weights import AnnouncedWeights
from rollmesh.mesh.errors import WeightsError
from rollmesh.mesh.trajectory.versions import PolicyVersion
from rollmesh.protos import generator_pb2

BY_DIGEST = "digest"
BY_LOG_PROBS = "log_probs"
# Mean absolute difference of log-probs, in nats, from which on weights are not those published. Two correct programs
# differ by rounding: by 1e-5 in 32 bits, and by 0.01 to 0.05 in 16. Weights that are not there differ by whole nats.
_TOLERANCE = {"float32": 0.01}
_TOLERANCE_16_BITS = 0.15
_NAMED = 3


@dataclass(frozen=True, slots=True)
class ProbeTokens:
    """Tokens with the learner's own log-probs.

    Attributes:
        policy: under which the learner has computed them.
        ids: at least two.
        log_probs: nats, one fewer than the tokens.
    """

    policy: PolicyVersion
    ids: Sequence[int]
    log_probs: Sequence[float]

    @classmethod
    def of(cls, request: generator_pb2.WakeRequest) -> ProbeTokens | None:
        """Those of a request; None where it has none."""
        if len(request.probe_ids) < 2 or len(request.probe_log_probs) != len(request.probe_ids) - 1:
            return None
        policy = PolicyVersion.from_proto(request.policy)
        return cls(policy, list(request.probe_ids), list(request.probe_log_probs))


async def check_tensors(served: ServedWeights, announced: AnnouncedWeights | None) -> bool:
    """Compares the tensors of an engine with those announced, in a thread.

    Args:
        served: as they are in the engine.
        announced: of the version in service; None where it has changed meanwhile.

    Returns:
        False where they cannot be compared.

    Raises:
        WeightsError: they differ.
    """
    if announced is None or served.tensors is None:
        return False
    # Imported late: torch takes a second.
    from rollmesh.generators.weights.served_digest import inspect

    found = await asyncio.to_thread(inspect, announced, served.tensors)
    if found.not_comparable:
        return False
    if found.differing or found.digest != announced.manifest.digest:
        names = ", ".join(found.differing[:_NAMED]) or "their digest"
        raise WeightsError(
            f"version {served.version} in the engine is not the one published: {len(found.differing)} tensors "
            f"differ ({names})",
            hint="it is fetched in full when the generator loads its weights again",
        )
    return True


def check_log_probs(found: NDArray[np.float32], probe: ProbeTokens, dtype: str) -> None:
    """Compares an engine's log-probs with the learner's.

    Args:
        found: nats, of each next token.
        probe: with those of the learner.
        dtype: in which the engine computes.

    Raises:
        WeightsError: they are those of other weights.
    """
    bound = _TOLERANCE.get(dtype, _TOLERANCE_16_BITS)
    mean = float(np.abs(found - np.asarray(probe.log_probs, np.float32)).mean())
    # Weights that are no numbers give log-probs that are none.
    if not math.isfinite(mean) or mean > bound:
        raise WeightsError(
            f"version {probe.policy} in the engine gives other log-probs than the learner: {mean:.3g} nats apart on "
            f"average, {bound:g} at most are due to rounding in {dtype}",
            hint="it is fetched in full when the generator loads its weights again",
        )
