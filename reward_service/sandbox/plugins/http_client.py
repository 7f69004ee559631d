"""Requests to a sandbox of another machine, bounded in time and in size.

Invariant: the key goes to the configured address alone; redirects and proxies are not followed.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.private_files import read_secret
from rollmesh.mesh.runtime.hosts import is_loopback
from rollmesh.mesh.text import bounded
from rollmesh.reward_service.sandbox.zygote_process import UnavailableError

_KEY = "reward.isolation.key_file"
_CONNECT_S = 10.0
_MOST_ANSWER = 64 << 20


class HttpClient:
    """Requests to one server.

    Args:
        url: of the server, without a path.
        key_file: file with the key; None: none is sent.
        ca_file: authority of its certificate; None: those that the host trusts.

    Raises:
        ConfigError: the key or the authority cannot be read, or the key would be sent in clear.
    """

    def __init__(self, url: str, key_file: Path | None, ca_file: Path | None = None) -> None:
        self.url = url
        key = "" if key_file is None else read_secret(key_file, _KEY)
        parts = urlsplit(url)
        if key and parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            raise ConfigError(
                f"reward.isolation.url {url} has no TLS, and {_KEY} would be sent in clear",
                hint="use https://, or a sandbox of this host",
            )
        self._tls: ssl.SSLContext | bool = True
        if ca_file is not None:
            try:
                self._tls = ssl.create_default_context(cafile=ca_file)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"reward.isolation.ca_file {ca_file}: {error}", hint="give a PEM file") from error
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def lines(self, path: str, body: Mapping[str, Any], timeout_s: float) -> AsyncIterator[AsyncIterator[bytes]]:
        """The lines of the answer to a request, as they come.

        Raises:
            UnavailableError: there is no answer, it is no success, or it is too long.
        """
        try:
            async with (
                self._opened().post(
                    self.url + path,
                    json=body,
                    headers=self._headers,
                    allow_redirects=False,
                    timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S),
                ) as response,
            ):
                if response.status != HTTPStatus.OK:
                    told = (await response.content.read(2000)).decode(errors="replace")
                    raise UnavailableError(f"{self.url}{path}: status {response.status}: {bounded(told, 300)}")
                yield _lines(response)
        except TimeoutError as error:
            raise UnavailableError(f"{self.url}{path}: no answer within {timeout_s:.1f} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UnavailableError(f"{self.url}{path}: {type(error).__name__}: {error}") from error

    async def json(self, path: str, body: Mapping[str, Any], timeout_s: float) -> Any:
        """The answer to a request, as JSON.

        Raises:
            UnavailableError: as `lines`, or it is no JSON.
        """
        async with self.lines(path, body, timeout_s) as lines:
            content = b"\n".join([line async for line in lines])
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise UnavailableError(f"{self.url}{path}: the answer is no JSON") from error

    async def close(self) -> None:
        """Ends all connections."""
        if self._session is not None:
            await self._session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=self._tls),
                auto_decompress=False,
                headers={"Accept-Encoding": "identity"},
            )
        return self._session


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    pending, size = bytearray(), 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > _MOST_ANSWER:
            raise UnavailableError(f"{response.url}: the answer is longer than {_MOST_ANSWER} bytes")
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            yield bytes(pending) + line
            pending.clear()
        pending += rest
    if pending:
        yield bytes(pending)
