"""Bodies of requests, read within bounds before anything is made of them.

Invariants: no body is held beyond its own limit, nor all together beyond theirs, whatever their headers say. A body
that does not come in time is refused. Nothing is decompressed. A body that would take long to parse is refused
unparsed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web

from rollmesh.generators.openai_server.errors import ApiError, overloaded

# Bytes of a body for tools, names and structure, in addition to the text of tokens.
_OTHER_BYTES = 1 << 20
# A token's worth of text as JSON: `\uXXXX` for each of its characters where they are not ASCII.
_TOKEN_BYTES = 32
# Lists, objects and their items, in addition to four for each token; text may hold the same characters.
_OTHER_VALUES = 1 << 14
_TOKEN_VALUES = 4
# Bodies that are held at once: of the largest size, and of any.
_HELD_LARGEST, _HELD = 16, 4096
# Seconds that a body has to come in.
_READ_S = 30.0


class BodyReader:
    """The bodies of one server.

    Args:
        context: tokens of prompt and answer at most.
    """

    def __init__(self, context: int) -> None:
        self._max_bytes = _OTHER_BYTES + _TOKEN_BYTES * context
        self._max_values = _OTHER_VALUES + _TOKEN_VALUES * context
        self._open = self._bytes = 0

    @asynccontextmanager
    async def read(self, request: web.Request) -> AsyncIterator[bytes]:
        """A request's body, of JSON; it counts while the context is open.

        Raises:
            ApiError: 408, 413, 415 or 429.
        """
        if request.content_type != "application/json" or "Content-Encoding" in request.headers:
            raise ApiError(415, "the body has to be application/json, and not packed", reason="unsupported_media_type")
        # Others take their time: Python's punycode goes through a megabyte for minutes.
        if (request.charset or "utf-8").lower() not in ("utf-8", "utf8", "us-ascii"):
            raise ApiError(415, "the body has to be UTF-8", reason="unsupported_media_type")
        if (request.content_length or 0) > self._max_bytes:
            raise self._too_large()
        body = bytearray()
        self._open += 1
        try:
            try:
                async with asyncio.timeout(_READ_S):
                    async for part in request.content.iter_any():
                        body += part
                        self._bytes += len(part)
                        if len(body) > self._max_bytes:
                            raise self._too_large()
                        if self._bytes > _HELD_LARGEST * self._max_bytes or self._open > _HELD:
                            raise overloaded("too many requests are being read, or too large ones")
            except TimeoutError as error:
                raise ApiError(408, f"the body did not come within {_READ_S:g} s", reason="timeout") from error
            if sum(map(body.count, (b",", b"[", b"{"))) > self._max_values:
                raise ApiError(
                    413, f"the body has over {self._max_values} values, for the model's context far too many",
                    reason="request_too_large",
                )  # fmt: skip
            yield bytes(body)
        finally:
            self._open -= 1
            self._bytes -= len(body)

    def _too_large(self) -> ApiError:
        message = f"the body has over {self._max_bytes} bytes, for the model's context far too many"
        return ApiError(413, message, reason="request_too_large")
