"""The proxy over HTTP, by the standard library alone: a thread for each connection of a caller.

Invariant: an answer that the server breaks off is broken off for the caller as well. A cut ends all connections of
callers, with the calls in progress. The server hears of a caller that has gone only when it answers.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from rollmesh.reward_service.conformance.http_transport import rows_of
from rollmesh.reward_service.conformance.proxy.faults import CallFaults, Counts, Faults
from rollmesh.reward_service.conformance.transport import TIMEOUT_HEADER

# Seconds in which the server has to begin its answer, and that an answer which never comes is waited for.
_LONGEST_S = 3600.0
# Seconds between looks for the end of the proxy.
_END_S = 0.05
_PASSED = ("Authorization", "Content-Type", TIMEOUT_HEADER, "grpc-timeout")
_NDJSON = "application/x-ndjson"


class HttpFaultProxy:
    """Forwards all calls to a server; those that score meet faults.

    Args:
        to: `http://host:port/path` or `https://...`.
        faults: to be met.

    Attributes:
        port: where it listens; 0 until it does.
        counts: of faults so far.
    """

    def __init__(self, to: str, faults: Faults) -> None:
        self.faults = faults
        self.counts = Counts()
        self.port = 0
        self._site = urlsplit(to.rstrip("/"))
        self._tls = ssl.create_default_context() if self._site.scheme == "https" else None
        self._lock = threading.Lock()
        self._server: _Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listens, and returns the port.

        Raises:
            RuntimeError: the port is taken.
        """
        try:
            self._server = _Server((host, port), self)
        except OSError as error:
            raise RuntimeError(f"cannot listen: {error.strerror}") from error
        threading.Thread(target=self._server.serve_forever, args=(_END_S,), name="fault-proxy", daemon=True).start()
        self.port = self._server.server_port
        return self.port

    async def stop(self) -> None:
        """Cuts all connections and ends."""
        if self._server is not None:
            await asyncio.to_thread(self._server.shutdown)
            self._server.cut()
            self._server.server_close()

    def begin(self) -> CallFaults:
        """Counts a call, and decides about it."""
        with self._lock:
            faults = self.counts.meet(self.faults)
            self.counts.cuts += faults.cuts
        return faults

    def lose(self, results: list[Any], faults: CallFaults) -> list[Any]:
        """The results that are not lost."""
        left = [result for result in results if not faults.drops and faults.chance.random() >= self.faults.lose]
        with self._lock:
            self.counts.lost_results += len(results) - len(left)
        return left

    @contextmanager
    def asked(self, method: str, path: str, headers: dict[str, str], body: bytes) -> Iterator[http.client.HTTPResponse]:
        """The server's answer to a request, to be read while the context lasts."""
        host, port = self._site.hostname or "", self._site.port
        connection = (
            http.client.HTTPSConnection(host, port, timeout=_LONGEST_S, context=self._tls)
            if self._tls
            else http.client.HTTPConnection(host, port, timeout=_LONGEST_S)
        )
        try:
            connection.request(method, self._site.path + path, body or None, headers)
            yield connection.getresponse()
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    """Keeps the connections of callers."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], proxy: HttpFaultProxy) -> None:
        super().__init__(address, _Handler)
        self.proxy = proxy
        self.open: set[socket.socket] = set()

    def cut(self) -> None:
        """Ends the connections of all callers."""
        for connection in list(self.open):
            with suppress(OSError):  # It has just ended by itself.
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Callers and servers may go, also because of a cut."""


class _Handler(BaseHTTPRequestHandler):
    """The connection of a caller."""

    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.open.add(self.connection)

    def finish(self) -> None:
        self.server.open.discard(self.connection)
        super().finish()

    def do_GET(self) -> None:
        with self._asked(b"") as response:
            self._answer(response.status, response.read())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        proxy = self.server.proxy
        faults = proxy.begin()
        if faults.cuts:
            self.server.cut()
            return
        if faults.fails:
            self._answer(503, b"a fault of the proxy")
            return
        if faults.repeats:
            with self._asked(body) as response:
                response.read()
        with self._asked(body) as response:
            time.sleep(faults.delay_s)
            if response.status != 200:
                self._answer(response.status, response.read(), response.getheader("Retry-After"))
            elif "stream" in urlsplit(self.path).query:
                self._pass_rows(response, faults)
            else:
                content = response.read()
                self._wait_if_dropped(faults)
                self._answer(200, self._spoiled(content, faults))

    def log_message(self, *_: Any) -> None:
        """Says nothing of single calls."""

    @contextmanager
    def _asked(self, body: bytes) -> Iterator[http.client.HTTPResponse]:
        headers = {name: value for name in _PASSED if (value := self.headers.get(name))}
        try:
            with self.server.proxy.asked(self.command, self.path, headers, body) as response:
                yield response
        except http.client.HTTPException as error:
            self.close_connection = True
            raise ConnectionResetError(f"the server: {error}") from error

    def _answer(self, status: int, content: bytes, retry_after: str | None = None) -> None:
        self.send_response(status)
        if retry_after is not None:
            self.send_header("Retry-After", retry_after)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _spoiled(self, content: bytes, faults: CallFaults) -> bytes:
        proxy = self.server.proxy
        if not proxy.faults.lose and not proxy.faults.reorder:
            return content
        answer = json.loads(content)
        answer["results"] = proxy.lose(answer.get("results", []), faults)
        if proxy.faults.reorder:
            faults.chance.shuffle(answer["results"])
        return json.dumps(answer).encode()

    def _pass_rows(self, response: http.client.HTTPResponse, faults: CallFaults) -> None:
        """Passes rows on as they come; in another order, some are held back for a while."""
        self.send_response(200)
        self.send_header("Content-Type", _NDJSON)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        held: list[bytes] = []
        for row in rows_of(response):
            held += self.server.proxy.lose([row], faults)
            if not self.server.proxy.faults.reorder:
                self._write(held)
            elif faults.chance.random() < 1 / 2:
                faults.chance.shuffle(held)
                self._write(held)
        faults.chance.shuffle(held)
        self._write(held)
        self._wait_if_dropped(faults)
        self.wfile.write(b"0\r\n\r\n")

    def _write(self, rows: list[bytes]) -> None:
        for row in rows:
            self.wfile.write(b"%x\r\n%s\n\r\n" % (len(row) + 1, row))
        rows.clear()

    def _wait_if_dropped(self, faults: CallFaults) -> None:
        """Waits until the caller of an answer that never comes has had enough."""
        if faults.drops:
            self.connection.settimeout(_LONGEST_S)
            self.connection.recv(1)
            self.close_connection = True
            raise ConnectionResetError("the caller is gone")
