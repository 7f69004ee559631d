"""HTTP with a server of SGLang: every call ends within its time, and every failure is an `EngineError`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import aiohttp

from rollmesh.generators.engines.errors import EngineError

# A server may owe its answer for as long as a step takes; whether it lives is watched elsewhere.
CALL_S = 600.0
# Shorter than the server's own (5 s, SGLANG_TIMEOUT_KEEP_ALIVE). A request on a connection that the other side is just
# closing is lost, and it is unknown whether it was accepted.
IDLE_S = 2.0
_END = b"data: [DONE]"


class RefusedError(EngineError):
    """The server has refused a call.

    Attributes:
        status: of the answer.
    """

    def __init__(self, path: str, status: int, message: str) -> None:
        super().__init__(f"the SGLang server answers {path} with {status}: {message[:500]}")
        self.status = status


class LostError(EngineError):
    """The connection broke, and it is not known why."""


class HttpClient:
    """A client of one server, in one event loop.

    Args:
        address: URL of the server.
        cause: awaited when a connection fails: the reason, where it is known that the server has died.
        key: API key of the server; empty: none.
    """

    def __init__(self, address: str, cause: Callable[[], Awaitable[str]], key: str = "") -> None:
        self.address = address.rstrip("/")
        self._cause = cause
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
            timeout=aiohttp.ClientTimeout(total=CALL_S, sock_connect=10.0),
        )

    async def get(self, path: str, timeout_s: float = CALL_S) -> Any:
        """The answer, parsed.

        Raises:
            EngineError: none came, or `RefusedError`.
        """
        return await self._call("GET", path, None, timeout_s)

    async def post(self, path: str, body: dict[str, Any] | None = None, timeout_s: float = CALL_S) -> Any:
        """The answer, parsed where it is JSON.

        Raises:
            EngineError: none came, or `RefusedError`.
        """
        return await self._call("POST", path, body if body is not None else {}, timeout_s)

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The events of an answer, as long as it takes; whether the server is alive is watched elsewhere.

        Raises:
            EngineError: the server has died, or `LostError`, or `RefusedError`.
        """
        endless = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
        try:
            async with self._session.post(self.address + path, json=body, timeout=endless) as response:
                if response.status != 200:
                    raise RefusedError(path, response.status, await response.text())
                rest = b""
                async for data in response.content.iter_any():
                    *events, rest = (rest + data).split(b"\n\n")
                    for event in events:
                        if event == _END:
                            return
                        if event:
                            yield _parsed(path, event.removeprefix(b"data:"))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise await self._lost_error(path, error) from error
        raise await self._lost_error(path, "the answer was cut off")

    async def close(self) -> None:
        """Ends all connections."""
        await self._session.close()

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> Any:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=10.0)
        try:
            async with self._session.request(method, self.address + path, json=body, timeout=timeout) as response:
                text = await response.text()
        except TimeoutError as error:
            raise EngineError(f"the SGLang server did not answer {path} within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise await self._lost_error(path, error) from error
        if response.status != 200:
            raise RefusedError(path, response.status, text)
        if response.content_type != "application/json":
            return text
        return _parsed(path, text) if text else None

    async def _lost_error(self, path: str, error: object) -> EngineError:
        cause = await self._cause()
        return (
            EngineError(cause) if cause else LostError(f"the connection to the SGLang server broke ({path}): {error}")
        )


def _parsed(path: str, text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise EngineError(f"the SGLang server answers {path} with what is no JSON: {text[:200]!r}") from error
