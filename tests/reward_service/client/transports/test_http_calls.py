"""Statuses, deadlines, keys and TLS of calls over HTTP, seen by who asked for scores."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.errors import ConfigError
from rollmesh.reward_service.client.client import CallLimits, RewardClient
from rollmesh.reward_service.client.endpoint import connector
from rollmesh.reward_service.client.transports.http_calls import _seconds
from rollmesh.reward_service.client.transports.interface import CallError, StreamingTransport
from tests.certificates import Authority
from tests.secrets_here import write_secret

_ONE_TRY = CallLimits(attempts=1)


def _scored(body: Any) -> web.Response:
    results = [{"item_id": item["item_id"], "scored": {"total": 1}} for item in body["items"]]
    return web.json_response({"results": results})


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (400, "endpoint", "HTTP 400 Bad Request: told so"),
        (401, "endpoint", "UNAUTHENTICATED"),
        (403, "endpoint", "PERMISSION_DENIED"),
        (404, "endpoint", "UNIMPLEMENTED"),
        (307, "endpoint", "redirections are not followed"),
        (408, "timeout", "does not answer in time"),
        (413, "endpoint", "RESOURCE_EXHAUSTED"),
        (500, "endpoint", "UNKNOWN: HTTP 500"),
        (502, "unreachable", "UNAVAILABLE"),
        (503, "unreachable", "UNAVAILABLE"),
        (504, "timeout", "does not answer in time"),
    ],
)
async def test_a_status_becomes_a_typed_error(
    status: int, code: str, words: str, scripted_http: Any, make_item: Any
) -> None:
    async def refuse(request: web.BaseRequest, body: Any) -> web.Response:
        return web.Response(status=status if request.method == "POST" else 404, text="told so")

    client = RewardClient([await scripted_http(refuse)], limits=_ONE_TRY)
    (result,) = await client.score([make_item()], timeout_s=0.5)
    assert result.error.code == code
    assert words in result.error.message
    await client.close()


async def test_a_server_that_throttles_loses_nothing(scripted_http: Any, make_item: Any) -> None:
    calls = []

    async def throttle(request: web.BaseRequest, body: Any) -> web.Response:
        if request.method == "GET":
            return web.Response(status=404)
        calls.append(body)
        if len(calls) <= 4:
            return web.Response(status=429 if len(calls) % 2 else 503, headers={"Retry-After": "0"})
        return _scored(body)

    # Items outlive more refusals than they have tries.
    client = RewardClient([await scripted_http(throttle)], limits=CallLimits(attempts=2))
    results = await client.score([make_item(f"{n}") for n in range(3)], timeout_s=60)
    assert [result.scored.total for result in results] == [1.0] * 3
    assert len(calls) == 5
    await client.close()


async def test_a_throttling_server_is_named_while_it_does(scripted_http: Any, make_item: Any) -> None:
    refused = asyncio.Event()

    async def throttle(request: web.BaseRequest, body: Any) -> web.Response:
        if request.method == "GET":
            return web.Response(status=404)
        refused.set()
        return web.Response(status=429, headers={"Retry-After": "300"}, text="quota")

    client = RewardClient([await scripted_http(throttle)])
    scoring = asyncio.create_task(client.score([make_item()], timeout_s=60))
    await asyncio.wait_for(refused.wait(), 60)
    async with asyncio.timeout(60):
        while "HTTP 429 Too Many Requests: quota" not in client.present_wait().reason:
            await asyncio.sleep(0.01)
    await client.close()
    assert (await scoring)[0].error.code == "closed"


async def test_a_body_that_is_too_large_is_sent_in_parts(scripted_http: Any, make_item: Any) -> None:
    sizes = []

    async def picky(request: web.BaseRequest, body: Any) -> web.Response:
        if request.method == "GET":
            return web.Response(status=404)
        sizes.append(len(body["items"]))
        return web.Response(status=413) if sizes[-1] > 2 else _scored(body)

    client = RewardClient([await scripted_http(picky)], limits=_ONE_TRY)
    results = await client.score([make_item(f"{n}") for n in range(5)], timeout_s=60)
    assert [result.scored.total for result in results] == [1.0] * 5
    assert sizes[:2] == [5, 2]
    await client.close()


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "[]",
        "{",
        '{"results": [{"item_id": "a"}]}',
        '{"results": []}',
        '{"results": [{"item_id": "a", "scored": "none"}]}',
        '{"results": [{"item_id": "a", "scored": []}]}',
        '{"results": [{"item_id": "a", "scored": {}, "scored": {}}]}',
    ],
)
async def test_an_answer_of_another_form_is_no_score(answer: str, scripted_http: Any, make_item: Any) -> None:
    async def odd(request: web.BaseRequest, body: Any) -> web.Response:
        return web.Response(text=answer, content_type="application/json")

    client = RewardClient([await scripted_http(odd)], limits=_ONE_TRY)
    (result,) = await client.score([make_item()], timeout_s=30)
    assert result.error.code in ("endpoint", "no_outcome", "missing_result")
    await client.close()


async def test_a_hanging_server_ends_with_the_deadline(scripted_http: Any, make_item: Any) -> None:
    async def hang(request: web.BaseRequest, body: Any) -> web.Response:
        if request.method == "POST":
            assert 0 < int(request.headers["Rollmesh-Timeout-Ms"]) <= 300
            await asyncio.sleep(600)
        return web.Response(status=404)

    client = RewardClient([await scripted_http(hang)], limits=CallLimits(timeout_s=0.3, attempts=1))
    (result,) = await client.score([make_item()], timeout_s=0.5)
    assert result.error.code == "timeout"
    await client.close()


async def test_results_come_row_by_row(serve_http: Any, make_item: Any) -> None:
    transport = connector(SecuritySection())(await serve_http("exact_match"))
    assert isinstance(transport, StreamingTransport)
    items = [make_item(str(n), "42" if n else "41") for n in range(50)]
    totals = {result.item_id: result.scored.total async for result in transport.stream(items, 60)}
    assert totals == {str(n): float(bool(n)) for n in range(50)}
    await transport.close()


@pytest.mark.parametrize(("end", "status"), [(b"", "UNAVAILABLE"), (b'{"item_id": 1}\n', "INTERNAL")])
async def test_rows_that_end_too_early_or_are_none(end: bytes, status: str, scripted_http: Any, make_item: Any) -> None:
    async def rows(request: web.BaseRequest, body: Any) -> web.StreamResponse:
        assert request.path_qs == "/v1/score?stream"
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"item_id": "a", "scored": {"total": 1}}\n' + end)
        if not end and request.transport is not None:
            request.transport.abort()
        return response

    transport = connector(SecuritySection())(await scripted_http(rows))
    assert isinstance(transport, StreamingTransport)
    with pytest.raises(CallError, match=status):
        assert [result async for result in transport.stream([make_item("a"), make_item("b")], 60)]
    await transport.close()


async def test_a_row_may_come_in_many_parts(scripted_http: Any, make_item: Any) -> None:
    rows = [json.dumps({"item_id": name, "scored": {"total": 1, "evidence": "x" * 99}}) for name in "abc"]

    async def parts(request: web.BaseRequest, body: Any) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        text = "\n".join(rows).encode()
        for begin in range(0, len(text), 40):
            await response.write(text[begin : begin + 40])
            await asyncio.sleep(0.001)
        return response

    transport = connector(SecuritySection())(await scripted_http(parts))
    assert isinstance(transport, StreamingTransport)
    found = [result async for result in transport.stream([make_item(name) for name in "abc"], 60)]
    assert [(each.item_id, len(each.scored.evidence)) for each in found] == [(name, 99) for name in "abc"]
    await transport.close()


async def test_a_broken_stream_keeps_what_was_answered(scripted_http: Any, make_item: Any) -> None:
    """The rest alone is asked again."""
    asked: list[list[str]] = []

    async def breaks_once(request: web.BaseRequest, body: Any) -> web.StreamResponse:
        if request.method == "GET":
            return web.json_response({"streams": True})
        ids = [item["item_id"] for item in body["items"]]
        asked.append(ids)
        results = [{"item_id": name, "scored": {"total": len(asked)}} for name in ids]
        if len(asked) > 1:
            # A call that was over in a moment is followed by one of the plain kind.
            assert "stream" not in request.query
            return web.json_response({"results": results})
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(json.dumps(results[0]).encode() + b"\n")
        assert request.transport is not None
        request.transport.close()
        return response

    client = RewardClient([await scripted_http(breaks_once)])
    results = await asyncio.wait_for(client.score([make_item(name) for name in "abc"], timeout_s=60), 120)
    assert [result.scored.total for result in results] == [1.0, 2.0, 2.0]
    assert [sorted(ids) for ids in asked] == [["a", "b", "c"], ["b", "c"]]
    await client.close()


async def test_no_one_there(make_item: Any) -> None:
    client = RewardClient(["http://127.0.0.1:1/base"])
    (result,) = await client.score([make_item()], timeout_s=0.3)
    assert result.error.code == "unreachable"
    await client.close()


async def test_the_key_goes_to_its_server_and_appears_nowhere(
    scripted_http: Any, make_item: Any, tmp_path: Path
) -> None:
    seen = []

    async def echo(request: web.BaseRequest, body: Any) -> web.Response:
        seen.append((request.path, request.headers.get("Authorization")))
        return web.Response(status=400, text=f"you sent {seen[-1][1]}")

    url = f"{await scripted_http(echo)}/base"
    keys = {f"{url}/": write_secret(tmp_path / "key", "very-secret")}
    client = RewardClient([url], connect=connector(SecuritySection(), keys), limits=_ONE_TRY)
    (result,) = await client.score([make_item()], timeout_s=30)
    assert seen == [("/base/v1/info", "Bearer very-secret"), ("/base/v1/score", "Bearer very-secret")]
    assert "you sent Bearer ***" in result.error.message
    await client.close()
    with pytest.raises(ConfigError, match="in clear"):
        far = "http://rewards.example/base"
        connector(SecuritySection(), {far: tmp_path / "key"})(far)


async def test_tls(serve_http: Any, make_item: Any, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.certify("service")
    url = await serve_http("exact_match", security=SecuritySection(tls_key=key, tls_cert=certificate))
    assert url.startswith("https://")
    trusting = RewardClient([url], connect=connector(SecuritySection(tls_ca=authority.pem)))
    assert (await trusting.score([make_item()], timeout_s=60))[0].scored.total == 1.0
    await trusting.close()
    doubting = RewardClient([url])
    assert (await doubting.score([make_item()], timeout_s=0.5))[0].error.code == "unreachable"
    await doubting.close()


def test_pauses_are_numbers_or_dates() -> None:
    now = datetime(2026, 5, 1, 12, tzinfo=UTC)
    assert _seconds("7", now) == 7.0
    assert _seconds("Fri, 01 May 2026 12:00:30 GMT", now) == 30.0
    assert _seconds("Fri, 01 May 2026 11:00:00 GMT", now) == 0.0
    assert _seconds("999999", now) == 600.0
    odd = (None, "soon", "", f"Fri, 31 Dec {'9' * 20} 23:59:59 GMT", f"Fri, 31 Dec 2026 23:59:59 +{'9' * 20}")
    assert [_seconds(header, now) for header in odd] == [None] * 5


def test_items_are_sent_with_the_names_of_the_contract() -> None:
    from rollmesh.protos import reward_pb2
    from rollmesh.reward_service.json_messages import to_json

    sent = json.loads(to_json(reward_pb2.ScoreItem(item_id="a", policy_version=7), defaults=False))
    assert sent == {"item_id": "a", "policy_version": "7"}
