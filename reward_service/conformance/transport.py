"""The kit's calls to a server, whatever the protocol.

Invariant: a call ends by its deadline, with an answer or a `CallError`. A cancelled call leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Literal, Protocol

from rollmesh.protos import reward_pb2

MAX_MESSAGE = 64 << 20
"""Bytes of the largest message that callers send or take."""
TIMEOUT_HEADER = "Rollmesh-Timeout-Ms"

Kind = Literal[
    "deadline",  # no answer in time
    "unavailable",  # no connection, or one that was lost
    "busy",  # refused for the present
    "exhausted",  # a message that is too large, or no room
    "unauthenticated",
    "denied",
    "unimplemented",  # no such method
    "invalid",  # the server says that the request is wrong
    "garbled",  # an answer that is none
    "failed",  # anything else: the handler raised
]


class CallError(Exception):
    """A call without an answer.

    Attributes:
        kind: what has become of it.
        status: as the protocol names it, for a reader.
        details: the server's own words.
    """

    def __init__(self, kind: Kind, status: str, details: str) -> None:
        super().__init__(f"{status}: {details}")
        self.kind: Kind = kind
        self.status = status
        self.details = details


class Stream(Protocol):
    """A ScoreStream call."""

    async def send(self, request: reward_pb2.ScoreStreamRequest) -> None:
        """Sends an item or a cancel.

        Raises:
            CallError: the stream has ended.
        """
        ...

    async def close(self) -> None:
        """Says that no more items come."""
        ...

    def results(self) -> AsyncIterator[reward_pb2.ScoreResult]:
        """Results as they come, until the server ends the stream.

        Raises:
            CallError: it ended in failure, or too late.
        """
        ...

    def cancel(self) -> None:
        """Ends the call at once."""
        ...


class Transport(Protocol):
    """Calls to one server.

    Attributes:
        two_way: items and cancels may be sent on a stream while its results come; else all items go at once.
        has_key: calls carry a credential.
    """

    two_way: bool
    has_key: bool

    async def connect(self, timeout_s: float) -> None:
        """Waits until something is there that speaks the protocol.

        Raises:
            CallError: nothing does.
        """
        ...

    async def score(self, request: reward_pb2.ScoreRequest, timeout_s: float) -> reward_pb2.ScoreResponse:
        """Calls Score.

        Raises:
            CallError: as it failed.
        """
        ...

    async def info(self, timeout_s: float) -> reward_pb2.InfoResponse:
        """Calls Info.

        Raises:
            CallError: as it failed.
        """
        ...

    async def health(self, timeout_s: float) -> str:
        """The trouble that the server itself reports of its health; empty if all is well.

        Raises:
            CallError: as it failed; `unimplemented` where it does not say.
        """
        ...

    def stream(self, timeout_s: float) -> Stream:
        """Opens a ScoreStream."""
        ...

    def with_key(self, key: str) -> Transport:
        """A transport to the same server with another key; empty: with none."""
        ...

    async def close(self) -> None:
        """Ends running calls and all connections."""
        ...
