"""The result of an episode of which nothing is left."""

from __future__ import annotations

import numpy as np

from rollmesh.generators.rollout.response_source import EpisodeResult
from rollmesh.mesh.trajectory.versions import VersionRuns


def empty_result(name: str, *, failure: str = "", aborted: bool = False) -> EpisodeResult:
    """A result without a token.

    Args:
        name: request id of the member.
        failure: why the episode says nothing about the policy.
        aborted: it was ended from outside.
    """
    return EpisodeResult(
        request_id=name,
        response_ids=np.zeros(0, np.int32),
        log_probs=np.zeros(0, np.float32),
        versions=VersionRuns(()),
        finish_reason="aborted" if aborted else "stop",
        failure=failure,
    )
