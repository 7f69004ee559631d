"""The interface of transports. Statuses are those of gRPC, whatever the protocol: the dispatcher knows no other.

Invariant: a call ends by its deadline, with an answer or a `CallError`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol, runtime_checkable

import grpc

from rollmesh.protos import reward_pb2


class CallError(Exception):
    """A call without an answer.

    Attributes:
        status: as gRPC names the failure.
        details: for a reader.
        retry_after_s: seconds in which the server wants no call; None: it said nothing.
        throttled: the server is well and refuses calls for the present. That is no failure of their items.
    """

    def __init__(
        self, status: grpc.StatusCode, details: str, *, retry_after_s: float | None = None, throttled: bool = False
    ) -> None:
        super().__init__(f"{status.name}: {details}")
        self.status = status
        self.details = details
        self.retry_after_s = retry_after_s
        self.throttled = throttled


class Transport(Protocol):
    """Calls to one server."""

    async def score(self, request: reward_pb2.ScoreRequest, timeout_s: float) -> reward_pb2.ScoreResponse:
        """Calls Score once.

        Raises:
            CallError: as it failed.
        """
        ...

    async def info(self, timeout_s: float) -> reward_pb2.InfoResponse:
        """Asks the server what it is.

        Raises:
            CallError: as it failed; UNIMPLEMENTED where it does not say.
        """
        ...

    async def close(self) -> None:
        """Ends running calls and the connection."""
        ...


@runtime_checkable
class StreamingTransport(Transport, Protocol):
    """Calls that may give each result as soon as it is there."""

    def stream(
        self, items: Sequence[reward_pb2.ScoreItem], timeout_s: float
    ) -> AsyncGenerator[reward_pb2.ScoreResult, None]:
        """Calls ScoreStream once; the call ends with the generator.

        Raises:
            CallError: as it failed.
        """
        ...


Connect = Callable[[str], Transport]
"""Makes the transport to an address; nothing is sent yet."""
