"""One request to an OpenAI-compatible endpoint: the only place where a judge does I/O.

Invariants: a request ends within its time, and its answer is read up to a bound. Certificates are verified. The key is
sent to the configured address alone: redirects and proxies are not followed, and no message repeats it. Whatever goes
wrong is a `JudgeError`.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from rollmesh.mesh.config.scorers.judge import JudgeSection
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.private_files import read_secret
from rollmesh.mesh.runtime.hosts import is_loopback
from rollmesh.mesh.text import bounded
from rollmesh.reward_service.judge.budget import Usage
from rollmesh.reward_service.judge.errors import AnswerError, RefusedError, UnavailableError
from rollmesh.reward_service.judge.retries import status_error

_MOST_BYTES = 4 << 20
_MOST_TOKENS = 1 << 31
_KEY = "reward.judge.api_key_file"


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer.

    Attributes:
        text: of its message.
        usage: as the endpoint counts; None: it does not.
    """

    text: str
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class Address:
    """The place of an endpoint, and the means to be let in.

    Attributes:
        url: of chat completions.
        key: empty: none.
        tls: None: the authorities that the host trusts.
        timeout_s: of one request.
    """

    url: str
    key: str
    tls: ssl.SSLContext | None
    timeout_s: float

    @classmethod
    def of(cls, section: JudgeSection) -> Address:
        """Reads the files that a configuration names.

        Raises:
            ConfigError: a file cannot be used, or the key would be sent in clear.
        """
        url = section.base_url or ""
        parts = urlsplit(url)
        key = "" if section.api_key_file is None else read_secret(section.api_key_file, _KEY)
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(f"{_KEY} {section.api_key_file} holds more than a key", hint="one line of ASCII")
        if key and parts.scheme == "http" and not is_loopback(parts.hostname or ""):
            raise ConfigError(
                f"reward.judge.base_url {url} has no TLS, and {_KEY} would be sent in clear",
                hint="use https://, or serve the judge on this host",
            )
        tls = None
        if section.ca_file is not None:
            try:
                tls = ssl.create_default_context(cafile=section.ca_file)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"reward.judge.ca_file {section.ca_file}: {error}", hint="give a PEM file") from error
        return cls(f"{url}/chat/completions", key, tls, section.timeout_s)


class Endpoint:
    """A client of one endpoint, on the event loop on which it is made.

    Args:
        address: of the endpoint.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if address.key:
            headers["Authorization"] = f"Bearer {address.key}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0, ssl=address.tls or True),
            timeout=aiohttp.ClientTimeout(total=address.timeout_s),
            # A small answer can unpack to any size.
            auto_decompress=False,
        )

    async def ask(self, body: Mapping[str, Any]) -> Reply:
        """Sends one request.

        Raises:
            JudgeError: there is no answer, or none that is understood.
        """
        try:
            async with self._session.post(self._address.url, json=body, allow_redirects=False) as response:
                content = await _bounded(response)
                status, retry_after = response.status, response.headers.get("Retry-After")
        except aiohttp.ClientConnectorCertificateError as error:
            raise RefusedError(
                f"the endpoint's certificate is not trusted: {error.certificate_error}",
                hint="name its authority in reward.judge.ca_file",
            ) from error
        except TimeoutError as error:
            raise UnavailableError(f"no answer within {self._address.timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UnavailableError(f"{type(error).__name__}: {error}") from error
        if status != HTTPStatus.OK:
            raise status_error(status, retry_after, self._shown(content), datetime.now(UTC))
        return _reply(content)

    async def close(self) -> None:
        """Ends all connections."""
        await self._session.close()

    def _shown(self, content: bytes) -> str:
        text = content[:4096].decode("utf-8", "replace")
        return bounded(text.replace(self._address.key, "***") if self._address.key else text, 1000)


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > _MOST_BYTES:
            response.close()
            raise AnswerError(f"the endpoint's answer is longer than {_MOST_BYTES} bytes")
    return bytes(content)


def _reply(content: bytes) -> Reply:
    try:
        found = json.loads(content)
        choice = found["choices"][0]
        text = choice["message"]["content"]
        cut = choice.get("finish_reason") == "length"
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        raise AnswerError(f"the endpoint's answer is no chat completion ({type(error).__name__})") from error
    if not isinstance(text, str):
        raise AnswerError("the judge's message has no text" + (": it was cut off (max_tokens)" if cut else ""))
    return Reply(text, _usage(found.get("usage")))


def _usage(found: Any) -> Usage | None:
    """Tokens as the endpoint counts them; None where it counts none, or nonsense."""
    if not isinstance(found, Mapping):
        return None
    prompt, answer = found.get("prompt_tokens"), found.get("completion_tokens")
    if not (isinstance(prompt, int) and isinstance(answer, int)):
        return None
    return Usage(prompt, answer) if min(prompt, answer) >= 0 and max(prompt, answer) < _MOST_TOKENS else None


async def keep_open(endpoint: Endpoint) -> None:
    """Closes an endpoint when the task that runs this is cancelled, as its loop's end does."""
    try:
        await asyncio.Event().wait()
    finally:
        await endpoint.close()
