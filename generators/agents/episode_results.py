"""The result of an episode of which nothing is left."""

from __future__ import annotations

from rollmesh.generators.rollout.response_source import EpisodeResult
from rollmesh.mesh.trajectory.payload_codec import Trajectory


def empty_result(name: str, *, failure: str = "", aborted: bool = False) -> EpisodeResult:
    """A result without a token.

    Args:
        name: request id of the member.
        failure: why the episode says nothing about the policy.
        aborted: it was ended from outside.
    """
    return EpisodeResult(
        request_id=name,
        sampled=Trajectory.empty(),
        finish_reason="aborted" if aborted else "stop",
        failure=failure,
    )
