"""Readers of a service's metrics, refused ones, and the resources that clients can hold of it."""

from __future__ import annotations

import asyncio
import http.client
import logging
import ssl
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import ConfigError, PortInUseError
from rollmesh.mesh.http import metrics as serving
from rollmesh.mesh.http.metrics import MOST_CONNECTIONS, PATH, metrics_server
from tests.certificates import Authority
from tests.secrets_here import TOKEN, write_secret

KEY = "the key of the metrics"
_DEADLINE_S = 240.0
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
_PATHS = (PATH, "/", "/metrics/", "/elsewhere", "/metrics/../etc/passwd")
_REQUEST = f"GET {PATH} HTTP/1.1\r\nHost: here\r\n\r\n".encode()


def registry(value: float = 7.0) -> CollectorRegistry:
    found = CollectorRegistry()
    Gauge("rollmesh_here", "A number.", registry=found).set(value)
    return found


def asked(url: str, method: str = "GET", path: str = PATH, **headers: str) -> tuple[int, bytes, str]:
    """Status, body and kind of the answer."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_DEADLINE_S)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers.get("Content-Type", "")
    finally:
        connection.close()


async def read(url: str) -> str:
    status, body, _ = await asyncio.to_thread(asked, url)
    assert status == 200
    return body.decode()


def values(text: str, parse: Any = text_string_to_metric_families) -> dict[str, float]:
    return {sample.name: sample.value for family in parse(text) for sample in family.samples}


async def opened(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    at = urlsplit(url)
    return await asyncio.open_connection(at.hostname, at.port)


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """The bytes that a server sends before it closes the connection."""
    async with asyncio.timeout(_DEADLINE_S):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


async def test_no_intruder_reads_them(tmp_path: Path) -> None:
    security = SecuritySection(metrics_key_file=write_secret(tmp_path / "key", KEY))
    strangers = {"no key": None, "a wrong key": "let me in", "half of it": KEY[:5], "the mesh's token": TOKEN}
    async with metrics_server(registry(), "127.0.0.1", security, enabled=True) as url:
        wrong, tried = [], 0
        for method in _METHODS:
            for path in _PATHS:
                for who, key in {**strangers, "who may": KEY}.items():
                    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
                    status, body, _ = await asyncio.to_thread(asked, url, method, path, **headers)
                    tried += 1
                    if status != _expected(who, method, path) or (b"rollmesh_here" in body) != _told(who, method, path):
                        wrong.append((method, path, who, status))
        assert not wrong
        assert tried == len(_METHODS) * len(_PATHS) * 5
        shown = await asyncio.to_thread(asked, url, Authorization=f"Bearer {KEY}")
        assert values(shown[1].decode())["rollmesh_here"] == 7.0


def _expected(who: str, method: str, path: str) -> int:
    if who != "who may":
        return 401
    if path != PATH:
        return 404
    return 200 if method in ("GET", "HEAD") else 405


def _told(who: str, method: str, path: str) -> bool:
    return (who, method, path) == ("who may", "GET", PATH)


async def test_prometheus_gets_the_form_that_it_asks_for() -> None:
    async with metrics_server(registry(), "127.0.0.1", SecuritySection(), enabled=True) as url:
        accepted = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2"
        _, body, kind = await asyncio.to_thread(asked, url, Accept=accepted)
        assert kind.startswith("application/openmetrics-text")
        assert values(body.decode(), openmetrics.text_string_to_metric_families)["rollmesh_here"] == 7.0
    async with metrics_server(registry(), "127.0.0.1", SecuritySection(), enabled=False) as url:
        assert not url


async def test_slow_clients_hold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One says nothing, one half a request, one a byte now and then."""
    monkeypatch.setattr(serving, "REQUEST_S", 2.0)
    async with metrics_server(registry(), "127.0.0.1", SecuritySection(), enabled=True) as url:
        clients = [await opened(url) for _ in range(3)]
        for _, writer in clients[1:]:
            writer.write(_REQUEST[:-2] + b"A: ")
        dripping = asyncio.create_task(_drip(clients[2][1]))
        assert [await until_closed(reader) for reader, _ in clients] == [b""] * 3
        dripping.cancel()
        for _, writer in clients:
            writer.close()
        assert "rollmesh_here 7.0" in await read(url)


async def test_a_body_is_neither_read_nor_waited_for() -> None:
    async with metrics_server(registry(), "127.0.0.1", SecuritySection(), enabled=True) as url:
        reader, writer = await opened(url)
        writer.write(_REQUEST.replace(b"Host", b"Content-Length: 1000000000\r\nHost"))
        assert (await until_closed(reader)).startswith(b"HTTP/1.1 200")
        writer.close()


async def _drip(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"a")
        await asyncio.sleep(0.01)


async def test_of_too_many_clients_the_oldest_make_room() -> None:
    async with (
        metrics_server(registry(), "127.0.0.1", SecuritySection(), enabled=True) as url,
        AsyncExitStack() as clients,
    ):
        readers = []
        for _ in range(MOST_CONNECTIONS + 3):
            reader, writer = await opened(url)
            clients.callback(writer.close)
            readers.append(reader)
        assert [await until_closed(reader) for reader in readers[:3]] == [b""] * 3
        assert "rollmesh_here 7.0" in await read(url)
        assert not readers[-1].at_eof()


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"a" * (1 << 20) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"A: a\r\n" * 10_000 + b"\r\n",
        b"\0" * 1000,
    ],
    ids=["line", "header", "headers", "nonsense"],
)
async def test_what_is_too_large_is_not_read(request_: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with metrics_server(registry(), "127.0.0.1", SecuritySection(), enabled=True) as url:
        reader, writer = await opened(url)
        writer.write(request_)
        told = await until_closed(reader)
        assert told.startswith((b"HTTP/1.0 400", b"HTTP/1.1 400")) or not told
        assert "rollmesh_here 7.0" in await read(url)
        writer.close()
    # A stranger fills no log.
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_page_is_written_beside_the_services_work() -> None:
    asked_, goes_on = threading.Event(), threading.Event()

    class Slow(Collector):
        def collect(self) -> Iterator[Metric]:
            asked_.set()
            assert goes_on.wait(_DEADLINE_S)
            yield GaugeMetricFamily("rollmesh_slow", "A number.", value=1.0)

        def describe(self) -> list[Metric]:
            return []

    found = CollectorRegistry()
    found.register(Slow())
    async with metrics_server(found, "127.0.0.1", SecuritySection(), enabled=True) as url:
        answer = asyncio.create_task(read(url))
        assert await asyncio.to_thread(asked_.wait, _DEADLINE_S)
        # The event loop is free to say so.
        goes_on.set()
        assert "rollmesh_slow 1.0" in await answer


async def test_an_address_of_others_needs_a_key(tmp_path: Path) -> None:
    everywhere = "0.0.0.0"
    with pytest.raises(ConfigError, match=r"metrics at 0\.0\.0\.0.*security\.metrics_key_file.*allow_insecure"):
        async with metrics_server(registry(), everywhere, SecuritySection(), enabled=True):
            pass
    key = write_secret(tmp_path / "key", KEY)
    for allowed in (SecuritySection(allow_insecure=True), SecuritySection(metrics_key_file=key)):
        async with metrics_server(registry(), everywhere, allowed, enabled=True) as url:
            assert url
    with pytest.raises(PortInUseError, match=r"192\.0\.2\.1, .*network\.metrics_host"):
        async with metrics_server(registry(), "192.0.2.1", SecuritySection(allow_insecure=True), enabled=True):
            pass


async def test_a_port_that_is_asked_for_is_taken_once() -> None:
    async with metrics_server(registry(), "127.0.0.1", SecuritySection(), enabled=True) as free:
        port = urlsplit(free).port or 0
    async with metrics_server(registry(), "127.0.0.1", SecuritySection(), port=port, enabled=True) as url:
        assert url == free
        with pytest.raises(PortInUseError, match=r"metrics_port: 0"):
            async with metrics_server(registry(), "127.0.0.1", SecuritySection(), port=port, enabled=True):
                pass


async def test_tls_covers_them(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ours")
    cert, key = authority.certify("service")
    async with metrics_server(
        registry(), "127.0.0.1", SecuritySection(tls_cert=cert, tls_key=key), enabled=True
    ) as url:
        at = urlsplit(url)
        assert at.scheme == "https"
        context = ssl.create_default_context(cafile=str(authority.pem))
        context.check_hostname = False
        reader, writer = await asyncio.open_connection(at.hostname, at.port, ssl=context)
        writer.write(_REQUEST)
        assert b"rollmesh_here 7.0" in await until_closed(reader)
        writer.close()
        reader, writer = await opened(url)
        writer.write(_REQUEST)
        assert b"rollmesh_here" not in await until_closed(reader)
        writer.close()
