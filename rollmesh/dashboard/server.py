"""The server of the page, on loopback unless told otherwise.

Invariants: it only reads, and only when a page asks; several pages share what was read. No client holds anything for
long (`mesh.http.connections`). Runs are read in a thread of their own, concurrently with the process's other work.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol, TypeVar

from aiohttp import web

from rollmesh.dashboard.access import API, Access, security_headers
from rollmesh.dashboard.page_data import PageData, Panel
from rollmesh.dashboard.page_files import MAIN, PLOTLY, STATIC, fill_page, import_map, plotly_gzipped, static_files
from rollmesh.dashboard.run_view import RunView
from rollmesh.mesh.access.tls import server_context
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import PortInUseError, RollmeshError
from rollmesh.mesh.http.connections import Connections
from rollmesh.mesh.http.server import serving

Result = TypeVar("Result")
MOST_CONNECTIONS = 64
# Seconds that a connection has for its request, and may be idle.
REQUEST_S = 30.0
# Seconds for which what was read is new enough for every page.
_FRESH_S = 1.0
# Digits of the place of a run in a request.
_PLACE_DIGITS = 4
# Names of runs are data too: the page sets its title once it has them.
_TITLE = "Rollmesh"
_TYPES = {"js": "text/javascript", "css": "text/css"}
_A_DAY = {"Cache-Control": "private, max-age=86400"}
_ASK_AGAIN = {"Cache-Control": "no-cache"}


class RunSource(Protocol):
    """Runs that a page shows, in a fixed order."""

    async def ask(self) -> None:
        """Asks the meshes of runs in progress; what does not answer becomes part of the view."""

    def read(self) -> Sequence[RunView]:
        """Reads files, in a thread of its own; returns the runs as they are now."""

    async def close(self) -> None:
        """Ends connections to meshes."""


@asynccontextmanager
async def page_server(
    source: RunSource, *, host: str, port: int, key: str = "", security: SecuritySection | None = None
) -> AsyncIterator[str]:
    """Serves the page of runs while the context lasts; yields its URL, with the key in the fragment.

    Args:
        source: the runs.
        host: address to bind.
        port: 0: a free one.
        key: that pages must show; empty: one is made.
        security: its certificate makes the page HTTPS.

    Raises:
        ConfigError: an unreadable certificate.
        PortInUseError: the address cannot be bound.
    """
    key = key or secrets.token_urlsafe(18)
    tls = server_context(security) if security is not None else None
    connections = Connections(MOST_CONNECTIONS)
    async with AsyncExitStack() as closers:
        thread = closers.enter_context(ThreadPoolExecutor(1, "page"))
        closers.push_async_callback(source.close)
        page = _Page(source, Access(key, host), thread, connections)
        try:
            address = await closers.enter_async_context(
                serving(page.answer, connections, host, port, tls, request_s=REQUEST_S)
            )
        except OSError as error:
            raise PortInUseError(
                f"cannot bind {host}, port {port}, for the page: {error.strerror}", hint="choose another --port"
            ) from error
        yield f"{address}/#key={key}"


class _Page:
    """Answers requests for the page, its files and its data."""

    def __init__(self, source: RunSource, access: Access, thread: ThreadPoolExecutor, connections: Connections) -> None:
        self._source = source
        self._access = access
        self._thread = thread
        self._connections = connections
        imports = import_map(embedded=False)
        self._html = fill_page(_TITLE, imports)
        self._headers = security_headers([imports, MAIN])
        self._data = PageData()
        self._read_at = -_FRESH_S
        self._reading = asyncio.Lock()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """One request; a connection may make several."""
        with self._connections.answering(request):
            response = self._access.refusal(request) or await self._found(request)
        response.headers.update(self._headers)
        return response

    async def _found(self, request: web.BaseRequest) -> web.Response:
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, headers={"Allow": "GET, HEAD"})
        path = request.path
        if path == "/":
            return web.Response(text=self._html, content_type="text/html", headers=_ASK_AGAIN)
        if path == PLOTLY:
            headers = {**_A_DAY, "Content-Encoding": "gzip"}
            body = await self._in_thread(plotly_gzipped)
            return web.Response(body=body, content_type=_TYPES["js"], charset="utf-8", headers=headers)
        if path.startswith(STATIC):
            return _static(path.removeprefix(STATIC))
        if path.startswith(API):
            return await self._json(request, path.removeprefix(API).split("/"))
        return web.Response(status=404, text="there is no such page\n")

    async def _json(self, request: web.BaseRequest, path: Sequence[str]) -> web.Response:
        if path == ["index"]:
            try:
                await self._refresh()
            except RollmeshError as error:
                # For example, a folder is being replaced: the page shows what it has until it can be read.
                return web.Response(status=503, text=f"{error.message}\n")
            return _tagged(request, self._data.index)
        if len(path) == 3 and path[0] == "runs" and path[1].isdecimal() and len(path[1]) <= _PLACE_DIGITS:
            panel = self._data.panel(int(path[1]), path[2])
            if panel is not None:
                return _tagged(request, panel)
        return web.Response(status=404, text="there is no such panel\n")

    async def _refresh(self) -> None:
        """Reads the runs again, unless that was done just now; pages that ask meanwhile wait for the same reading."""
        async with self._reading:
            if time.monotonic() - self._read_at < _FRESH_S:
                return
            await self._source.ask()
            await self._in_thread(lambda: self._data.update(self._source.read()))
            self._read_at = time.monotonic()

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _static(name: str) -> web.Response:
    text = static_files().get(name)
    kind = _TYPES.get(name.rpartition(".")[2])
    if text is None or kind is None:
        return web.Response(status=404, text="there is no such file\n")
    return web.Response(text=text, content_type=kind, headers=_ASK_AGAIN)


def _tagged(request: web.BaseRequest, panel: Panel) -> web.Response:
    """A panel, or nothing where the page has it already."""
    tag = f'"{panel.tag}"'
    if request.headers.get("If-None-Match") == tag:
        return web.Response(status=304, headers={"ETag": tag, **_ASK_AGAIN})
    response = web.Response(text=panel.text, content_type="application/json", headers={"ETag": tag, **_ASK_AGAIN})
    response.enable_compression()
    return response
