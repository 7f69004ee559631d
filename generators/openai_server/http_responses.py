"""Answers of the endpoint over HTTP: their bodies, and how they are sent to clients that may not take them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from aiohttp import web

from rollmesh.generators.openai_server.completion_stream import CompletionCall, Finished, TextDelta
from rollmesh.generators.openai_server.conversations.sessions import Session
from rollmesh.generators.openai_server.errors import ApiError
from rollmesh.generators.openai_server.response_format import ResponseFormatter, event

# Seconds that a client has to take a part of its answer.
_WRITE_S = 60.0


def response_json(formatter: ResponseFormatter, completion: CompletionCall, answers: Sequence[Finished]) -> str:
    """The body for a call that has all its answers."""
    return json.dumps(formatter.response(completion, answers))


def events_of(formatter: ResponseFormatter, piece: TextDelta | Finished, completion: CompletionCall) -> bytes:
    """The events of one piece of a streamed answer."""
    chunks = (
        formatter.end_chunks(piece, completion)
        if isinstance(piece, Finished)
        else formatter.delta_chunks(piece, completion)
    )
    return b"".join(map(event, chunks))


def session_json(session: Session) -> str:
    """A session with its turns, for a reader."""
    return json.dumps({"id": session.name, "object": "session", "turns": session.record.to_json()})


async def send_response(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """Sends an answer and returns it; raises ConnectionError where the client does not take it."""
    if not response.prepared:
        async with _write_deadline():
            await response.prepare(request)
            await response.write_eof()
    return response


async def send_part(response: web.StreamResponse, data: bytes) -> None:
    """Sends a part of an answer; raises ConnectionError where the client does not take it."""
    async with _write_deadline():
        await response.write(data)


@asynccontextmanager
async def _write_deadline() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(_WRITE_S):
            yield
    except TimeoutError as error:
        raise ConnectionResetError(f"the client took nothing for {_WRITE_S:g} s") from error


def refusal_response(error: ApiError) -> web.Response:
    """A refusal in OpenAI's form."""
    headers: Mapping[str, str] = {}
    if error.retry_after_s is not None:
        headers = {"Retry-After": str(error.retry_after_s)}
    return web.json_response(error.body(), status=error.status, headers=headers)
