"""A channel with calls that prove the identity of their caller.

It does not use grpc.aio's interceptors. Those pass the messages of a stream from task to task, and the last task waits
for ever if the stream cannot be opened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import grpc

from rollmesh.mesh.access.credentials import Credentials, SharedKey
from rollmesh.mesh.access.permissions import contract_of

AUTHORIZATION = "authorization"


class AuthenticatedChannel(grpc.aio.Channel):
    """Sends a claim for its contract with every call.

    Args:
        channel: makes the calls.

    Attributes:
        credentials: of the caller.
    """

    def __init__(self, channel: grpc.aio.Channel, credentials: Credentials | SharedKey) -> None:
        self._channel = channel
        self.credentials = credentials

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._sending(method, self._channel.unary_unary(method, *args, **kwargs))

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._sending(method, self._channel.unary_stream(method, *args, **kwargs))

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._sending(method, self._channel.stream_unary(method, *args, **kwargs))

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._sending(method, self._channel.stream_stream(method, *args, **kwargs))

    def _sending(self, path: str, method: Callable[..., Any]) -> Callable[..., Any]:
        contract = contract_of(path)

        def call(*args: Any, metadata: Iterable[tuple[str, str]] = (), **kwargs: Any) -> Any:
            claim = (AUTHORIZATION, f"Bearer {self.credentials.claim(contract)}")
            return method(*args, metadata=(*metadata, claim), **kwargs)

        return call

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    async def __aenter__(self) -> AuthenticatedChannel:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.close()
