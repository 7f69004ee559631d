"""HTTP servers that answer as told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest_asyncio
from aiohttp import web


@pytest_asyncio.fixture
async def scripted_http() -> AsyncIterator[Callable[..., Awaitable[str]]]:
    """Starts servers: `await scripted_http(handler)` -> URL; the handler gets each request, and its JSON or None."""
    runners: list[web.ServerRunner] = []

    async def start(handler: Callable[[web.BaseRequest, Any], Awaitable[web.StreamResponse]]) -> str:
        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            return await handler(request, await request.json() if request.can_read_body else None)

        runner = web.ServerRunner(web.Server(answer, handler_cancellation=True), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield start
    for runner in runners:
        await runner.cleanup()
