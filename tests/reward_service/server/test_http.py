"""The service over HTTP: what it answers to callers without a client of ours, and what it refuses."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.config.scorers.http import HttpSection
from rollmesh.mesh.errors import ConfigError, PortInUseError
from rollmesh.reward_service.scoring.engine import ScoringEngine
from rollmesh.reward_service.server.http import http_server
from rollmesh.reward_service.server.server import RewardServer
from tests.secrets_here import write_secret

_ITEM = {"item_id": "a", "group_id": "g", "data_source": "x", "response": "42", "ground_truth_json": '"42"'}


async def _ask(url: str, body: Any = None, **options: Any) -> tuple[int, str, aiohttp.ClientResponse]:
    method = options.pop("method", "GET" if body is None else "POST")
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, json=body, **options) as response,
    ):
        return response.status, await response.text(), response


async def test_a_caller_needs_nothing_but_json(serve_http: Any) -> None:
    url = await serve_http("exact_match")
    status, text, _ = await _ask(f"{url}/v1/score", {"items": [_ITEM, {**_ITEM, "item_id": "b", "response": "41"}]})
    assert status == 200
    right, wrong = json.loads(text)["results"]
    assert right["scored"]["total"] == 1
    assert right["scored"]["components"] == {"exact_match": 1.0}
    assert wrong["scored"]["total"] == 0, "zero is written out"
    camel = {"itemId": "c", "groupId": "g", "response": "42", "groundTruthJson": '"42"', "ofLaterVersions": 1}
    _, text, _ = await _ask(f"{url}/v1/score", {"items": [camel]})
    assert json.loads(text)["results"][0]["scored"]["total"] == 1
    status, text, _ = await _ask(f"{url}/v1/info")
    info = json.loads(text)
    assert (status, info["name"], info["scorers"], info["max_items"]) == (200, "rollmesh", {"exact_match": "2"}, 0)
    assert (await _ask(f"{url}/healthz"))[:2] == (200, "ok\n")


async def test_results_stream_as_they_come(serve_http: Any) -> None:
    read = threading.Event()

    def held(solution_str: str, ground_truth: str) -> float:
        return float(solution_str == "quick" or read.wait(120))

    url = await serve_http(held)
    items = [{**_ITEM, "item_id": name, "response": name} for name in ("held", "quick")]
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/score?stream", json={"items": items}) as response,
    ):
        first = json.loads(await response.content.readline())
        assert first["item_id"] == "quick"
        read.set()
        second = json.loads(await response.content.readline())
        assert second["item_id"] == "held"
        assert await response.content.read() == b""


async def test_the_answer_comes_before_the_callers_deadline(serve_http: Any) -> None:
    async def slow(solution_str: str, ground_truth: str) -> float:
        await asyncio.sleep(60)
        return 1.0

    url = await serve_http(slow)
    for header in ({"Rollmesh-Timeout-Ms": "1000"}, {"grpc-timeout": "1S"}):
        status, text, _ = await _ask(f"{url}/v1/score", {"items": [_ITEM]}, headers=header)
        assert status == 200
        (result,) = json.loads(text)["results"]
        assert result["error"]["retryable"]


async def test_bodies_that_never_end_share_a_bound(serve_http: Any) -> None:
    url = await serve_http("exact_match", max_message_mb=1)
    site = urlsplit(url)
    head = f"POST /v1/score HTTP/1.1\r\nHost: {site.netloc}\r\nContent-Type: application/json\r\n"
    held = []
    for _ in range(5):
        reader, writer = await asyncio.open_connection(site.hostname, site.port)
        writer.write(f"{head}Content-Length: {1 << 20}\r\n\r\n".encode() + b" " * ((1 << 20) - 1))
        held.append((reader, writer))
    async with asyncio.timeout(20):
        ended = asyncio.as_completed([reader.readline() for reader, _ in held])
        assert b" 503 " in await next(ended)
    for _, writer in held:
        writer.close()
    while (await _ask(f"{url}/v1/score", {"items": [_ITEM]}))[0] != 200:
        await asyncio.sleep(0.05)


async def test_requests_that_are_refused(serve_http: Any) -> None:
    url = await serve_http("exact_match", max_message_mb=1)
    score = f"{url}/v1/score"
    assert (await _ask(f"{url}/elsewhere"))[0] == 404
    status, _, response = await _ask(score)
    assert (status, response.headers["Allow"]) == (405, "POST")
    assert (await _ask(score, method="POST", data="{}", headers={"Content-Type": "text/plain"}))[0] == 415
    status, text, _ = await _ask(score, {"items": [_ITEM, _ITEM]})
    assert status == 400
    assert "item_id" in json.loads(text)["error"]["message"]
    for body in ("{", "[" * 100_000, '{"items": 1}', '{"items": [{"item_id": 1}]}'):
        sent = {"method": "POST", "data": body, "headers": {"Content-Type": "application/json"}}
        assert (await _ask(score, **sent))[0] == 400, body[:20]
    assert (await _ask(score, {"items": [{**_ITEM, "response": "x" * (1 << 21)}]}))[0] == 413
    for words in ("soon", "9" * 400, "9" * 5000):
        for header in ({"Rollmesh-Timeout-Ms": words}, {"grpc-timeout": words}):
            assert (await _ask(score, {"items": [_ITEM]}, headers=header))[0] == 400, words
    for body in ([], {"items": ["x"]}, {"items": [{**_ITEM, "spans": [["begin"]]}]}):
        assert (await _ask(score, body))[0] == 400, body


async def test_a_key_is_asked_for(serve_http: Any, tmp_path: Path) -> None:
    url = await serve_http("exact_match", key_file=write_secret(tmp_path / "key", "the key"))
    status, text, response = await _ask(f"{url}/v1/score", {"items": [_ITEM]})
    assert (status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert "key" in text
    right = {"Authorization": "Bearer the key"}
    assert (await _ask(f"{url}/v1/score", {"items": [_ITEM]}, headers=right))[0] == 200
    assert (await _ask(f"{url}/healthz"))[0] == 200, "probes have no key"


async def test_no_one_else_is_served_by_mistake() -> None:
    server = RewardServer(ScoringEngine(["exact_match"]))
    security = SecuritySection()
    with pytest.raises(ConfigError, match=r"reward\.http\.key_file|without a key"):
        async with http_server(server.servicer, HttpSection(port=0), "0.0.0.0", security, max_message_mb=1):
            pass
    async with http_server(server.servicer, HttpSection(), "127.0.0.1", security, max_message_mb=1) as url:
        assert url == "", "none is asked for"
    async with http_server(server.servicer, HttpSection(port=0), "127.0.0.1", security, max_message_mb=1) as url:
        taken = HttpSection(port=int(url.rpartition(":")[2]))
        with pytest.raises(PortInUseError, match=r"reward\.http\.port"):
            async with http_server(server.servicer, taken, "127.0.0.1", security, max_message_mb=1):
                pass
    await server.stop(0)
