"""Where notices are found: the metadata service of each cloud, or a file.

Invariants: a question takes at most `_ASK_S`, its answer at most `_MOST_BYTES`, and is never sent through a proxy. An
answer that is none, once, hides no later notice. Credentials of the machine, which the same services give out, are
never asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from typing import Protocol

import aiohttp

from rollmesh.mesh.errors import ConfigError, UnreachableError
from rollmesh.mesh.preemption.notice import Notice, in_utc, of_aws, of_azure, of_file, of_gcp

_ASK_S = 2.0
_MOST_BYTES = 1 << 18
# Longest life of a session of AWS's metadata service; it is opened again when it has ended.
_SESSION_S = 21600
# Seconds that a file without a number gives: as the shortest notice of a cloud.
_FILE_S = 30.0


class NoticeSource(Protocol):
    """Says whether this machine is about to end."""

    async def ask(self) -> Notice | None:
        """The notice; None as long as there is none.

        Raises:
            UnreachableError: no answer, or one that is not understood.
        """
        ...


class FileSource:
    """A notice is the existence of a file; it may hold the number of seconds that are left."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    async def ask(self) -> Notice | None:
        """As `NoticeSource.ask`."""
        try:
            text = await asyncio.to_thread(self._path.read_text)
            return of_file(text, str(self._path), _FILE_S)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise UnreachableError(
                f"the notice {self._path} cannot be read: {error}", hint="leave it empty, or write seconds into it"
            ) from error


class _Metadata:
    """One metadata service over HTTP.

    Args:
        url: without a path.
        headers: of each question.
    """

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self._url = url.rstrip("/")
        self._headers = dict(headers or {})

    async def ask(
        self, path: str, headers: Mapping[str, str] | None = None, *, method: str = "GET"
    ) -> tuple[int, str, datetime]:
        """Status and body of the answer, and the time by the clock of the service.

        Raises:
            UnreachableError: no answer in time.
        """
        sent = {**self._headers, **(headers or {})}
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_ASK_S)) as session,
                session.request(method, self._url + path, headers=sent, allow_redirects=False) as answer,
            ):
                at = answer.headers.get("Date")
                now = in_utc(parsedate_to_datetime(at)) if at else datetime.now(UTC)
                return answer.status, await _body_of(answer), now
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise UnreachableError(
                f"the metadata service at {self._url} does not answer: {str(error) or type(error).__name__}",
                hint="is this a machine of that cloud, and does its firewall let this process ask?",
            ) from error

    async def get(self, path: str) -> tuple[str, datetime]:
        """Body and time of a good answer.

        Raises:
            UnreachableError: there is none.
        """
        status, body, now = await self.ask(path)
        if status != HTTPStatus.OK:
            raise self.refused(path, status)
        return body, now

    def refused(self, path: str, status: int) -> UnreachableError:
        """The error of an answer that is no answer."""
        return UnreachableError(
            f"the metadata service at {self._url} answers {path} with {status}",
            hint="is this a machine of that cloud?",
        )


async def _body_of(answer: aiohttp.ClientResponse) -> str:
    body = bytearray()
    async for part in answer.content.iter_any():
        body += part
        if len(body) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES} bytes")
    return body.decode()


class AwsSource:
    """`spot/instance-action` of the instance metadata service, version 2: questions belong to a session."""

    def __init__(self, url: str) -> None:
        self._metadata = _Metadata(url)
        self._session = ""

    async def ask(self) -> Notice | None:
        """As `NoticeSource.ask`."""
        try:
            return await self._notice()
        except UnreachableError:
            # Something else may have given the session out.
            self._session = ""
            raise

    async def _notice(self) -> Notice | None:
        path = "/latest/meta-data/spot/instance-action"
        status, body, now = await self._ask_in_session(path)
        if status == HTTPStatus.UNAUTHORIZED:
            self._session = ""
            status, body, now = await self._ask_in_session(path)
        if status == HTTPStatus.NOT_FOUND:
            return None
        if status != HTTPStatus.OK:
            raise self._metadata.refused(path, status)
        return _understood(lambda: of_aws(body, now))

    async def _ask_in_session(self, path: str) -> tuple[int, str, datetime]:
        if not self._session:
            self._session = await self._open_session()
        return await self._metadata.ask(path, {"X-aws-ec2-metadata-token": self._session})

    async def _open_session(self) -> str:
        path, life = "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(_SESSION_S)}
        status, body, _ = await self._metadata.ask(path, life, method="PUT")
        if status != HTTPStatus.OK:
            raise self._metadata.refused(path, status)
        return body


class GcpSource:
    """`instance/preempted`."""

    def __init__(self, url: str) -> None:
        self._metadata = _Metadata(url, {"Metadata-Flavor": "Google"})

    async def ask(self) -> Notice | None:
        """As `NoticeSource.ask`."""
        body, _ = await self._metadata.get("/computeMetadata/v1/instance/preempted")
        return _understood(lambda: of_gcp(body))


class AzureSource:
    """Scheduled events, of which those of this machine count."""

    def __init__(self, url: str) -> None:
        self._metadata = _Metadata(url, {"Metadata": "true"})

    async def ask(self) -> Notice | None:
        """As `NoticeSource.ask`."""
        name, _ = await self._metadata.get("/metadata/instance/compute/name?api-version=2021-02-01&format=text")
        body, now = await self._metadata.get("/metadata/scheduledevents?api-version=2020-07-01")
        return _understood(lambda: of_azure(body, name.strip(), now))


def _understood(parse: Callable[[], Notice | None]) -> Notice | None:
    try:
        return parse()
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UnreachableError(
            f"the answer of the metadata service is not understood: {error}", hint="does something answer in its place?"
        ) from error


_CLOUDS: Mapping[str, tuple[Callable[[str], NoticeSource], str]] = {
    "aws": (AwsSource, "http://169.254.169.254"),
    "gcp": (GcpSource, "http://metadata.google.internal"),
    "azure": (AzureSource, "http://169.254.169.254"),
}
FORMS = "aws, gcp, azure (each also as NAME=URL of its metadata service), file:PATH"


def source_of(text: str) -> NoticeSource:
    """The source that a setting names.

    Args:
        text: one of `FORMS`.

    Raises:
        ConfigError: it names none.
    """
    kind, _, path = text.partition(":")
    if kind == "file" and path:
        return FileSource(path)
    name, equals, url = text.partition("=")
    cloud = _CLOUDS.get(name)
    if cloud is None or (equals and not url.startswith(("http://", "https://"))):
        raise ConfigError(f"no source of notices is called {text!r}", hint=f"one of: {FORMS}")
    make, usual_url = cloud
    return make(url or usual_url)
