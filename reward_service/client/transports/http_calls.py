"""Calls over HTTP, whatever their bodies say: connection, key, deadline, bounds, statuses in the dispatcher's terms.

Invariants: a redirection is not followed, so that the key and the samples go to the configured host alone. A key goes
in clear to this host alone. No answer is longer than the bound.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import grpc

from rollmesh.mesh.access.tls import client_context
from rollmesh.mesh.config.reward import EndpointTls
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.runtime.hosts import is_loopback
from rollmesh.mesh.text import bounded
from rollmesh.reward_service.client.transports.interface import CallError
from rollmesh.reward_service.json_messages import TIMEOUT_HEADER

_LONGEST_PAUSE_S = 600.0
_STATUSES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.UNIMPLEMENTED,
    405: grpc.StatusCode.UNIMPLEMENTED,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    415: grpc.StatusCode.UNIMPLEMENTED,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    502: grpc.StatusCode.UNAVAILABLE,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}


@dataclass(frozen=True, slots=True)
class Site:
    """Where calls go.

    Attributes:
        url: of http or https, without a slash at its end.
        key: sent as a bearer token; empty: none.
        tls: its authority, without which the usual public ones check its certificate, and the one that it is shown.
        most_bytes: of an answer.
        where: beginning of the configuration keys that name the files of `tls`, for errors.
    """

    url: str
    key: str
    tls: EndpointTls
    most_bytes: int
    where: str = "reward.tls."

    def checked(self) -> Site:
        """Refuses a key that others could read on its way.

        Raises:
            ConfigError: it would be sent in clear to another host.
        """
        parts = urlsplit(self.url)
        if self.key and parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            raise ConfigError(
                f"reward endpoint {self.url} has no TLS, and its key (reward.key_files) would be sent in clear",
                hint="use https://, or serve the rewards on this host",
            )
        return self


class HttpCalls:
    """Calls to one site; its connections open with the first one."""

    def __init__(self, site: Site) -> None:
        self._site = site.checked()
        own = site.tls
        encrypted = site.url.startswith("https://")
        self._tls = client_context(own.ca, own.cert, own.key, site.where) if encrypted else None
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: bytes, timeout_s: float) -> bytes:
        """The answer to a JSON body.

        Args:
            path: that follows the site's.

        Raises:
            CallError: there is none, or its status is not 200.
        """
        async with self._answered("POST", path, body, timeout_s) as response:
            return b"".join([chunk async for chunk in self._bounded(response)])

    async def post_for_rows(self, path: str, body: bytes, timeout_s: float) -> AsyncGenerator[bytes, None]:
        """As `post`; the answer row by row, as it comes."""
        async with self._answered("POST", path, body, timeout_s) as response:
            # A long row comes in many chunks, which are put together once.
            begun: list[bytes] = []
            async for chunk in self._bounded(response):
                *ends, rest = chunk.split(b"\n")
                for end in ends:
                    yield b"".join([*begun, end])
                    begun.clear()
                begun.append(rest)
            if last := b"".join(begun):
                yield last

    async def get(self, path: str, timeout_s: float) -> bytes:
        """As `post`, without a body."""
        async with self._answered("GET", path, None, timeout_s) as response:
            return b"".join([chunk async for chunk in self._bounded(response)])

    async def close(self) -> None:
        """Ends running calls and all connections."""
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def _answered(
        self, method: str, path: str, body: bytes | None, timeout_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The answer with status 200, to be read while the context lasts; errors of reading it are the call's."""
        headers = {TIMEOUT_HEADER: str(max(1, int(timeout_s * 1000)))}
        if body is not None:
            headers["Content-Type"] = "application/json"
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._opened().request(
                method, self._site.url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status != 200:
                    raise self._failure(response, b"".join([chunk async for chunk in self._bounded(response)]))
                yield response
        except TimeoutError as error:
            raise CallError(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise CallError(grpc.StatusCode.UNAVAILABLE, f"{type(error).__name__}: {error}") from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
            if self._site.key:
                headers["Authorization"] = f"Bearer {self._site.key}"
            self._session = aiohttp.ClientSession(
                headers=headers,
                connector=aiohttp.TCPConnector(limit=0, ssl=self._tls or True),
                # A small answer can unpack to any size.
                auto_decompress=False,
            )
        return self._session

    async def _bounded(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        size = 0
        async for chunk in response.content.iter_any():
            size += len(chunk)
            if size > self._site.most_bytes:
                response.close()
                raise CallError(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, f"its answer is longer than {self._site.most_bytes} bytes"
                )
            yield chunk

    def _failure(self, response: aiohttp.ClientResponse, content: bytes) -> CallError:
        status = response.status
        text = content[:2000].decode("utf-8", "replace").strip()
        if self._site.key:
            text = text.replace(self._site.key, "***")
        details = f"HTTP {status} {response.reason or ''}".rstrip() + (f": {bounded(text, 500)}" if text else "")
        if 300 <= status < 400:
            return CallError(grpc.StatusCode.UNIMPLEMENTED, f"{details} (redirections are not followed)")
        pause = _seconds(response.headers.get("Retry-After"), datetime.now(UTC))
        throttled = status == 429 or (status == 503 and pause is not None)
        code = _STATUSES.get(status, grpc.StatusCode.UNKNOWN)
        return CallError(code, details, retry_after_s=pause, throttled=throttled)


def read_json(content: bytes) -> Any:
    """The value of an answer.

    Raises:
        CallError: it is no JSON.
    """
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CallError(grpc.StatusCode.INTERNAL, f"its answer is no JSON: {error}") from error


def _seconds(header: str | None, now: datetime) -> float | None:
    """Seconds of `Retry-After`, which has a number or a date; None without it, or for anything else."""
    if header is None:
        return None
    try:
        seconds = float(header) if header.strip().isdecimal() else (parsedate_to_datetime(header) - now).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(0.0, seconds), _LONGEST_PAUSE_S)
