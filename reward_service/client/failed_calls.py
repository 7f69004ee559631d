"""Failed calls in words, and what kind of failure each status is."""

from __future__ import annotations

import grpc

from rollmesh.reward_service.client.transports.interface import CallError

LOST = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED})
"""The connection or the server failed, not the request."""
HOPELESS = frozenset(
    {grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
)
"""Another try at the same endpoint will fail likewise."""


def in_words(error: CallError) -> str:
    """A failed call, after its endpoint's name."""
    return "does not answer in time" if error.status is grpc.StatusCode.DEADLINE_EXCEEDED else str(error)


def describe_failure(status: grpc.StatusCode, what: str, timeout_s: float) -> tuple[str, str]:
    """(code, message) of an item after a failed call."""
    if status in LOST:
        return "unreachable", what
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "timeout", f"{what} (calls get {timeout_s:g} s)"
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return "endpoint", f"{what} (is it a rollmesh.v1.Reward server?)"
    if status is grpc.StatusCode.UNAUTHENTICATED:
        return (
            "endpoint",
            f"{what} (a service with the mesh's token must join the mesh, not be listed in reward.endpoints)",
        )
    return "endpoint", what
