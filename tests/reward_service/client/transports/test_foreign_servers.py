"""Servers for OpenRLHF and NeMo Gym as endpoints: what is sent to them, and what becomes of their answers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web
from openai.types.responses import Response

from rollmesh.mesh.errors import ConfigError
from rollmesh.reward_service.client.client import CallLimits, RewardClient
from rollmesh.reward_service.routing import is_endpoint, target_of, url_of

_ONE_TRY = CallLimits(attempts=1)


async def test_openrlhfs_form(scripted_http: Any, make_item: Any) -> None:
    bodies = []

    async def get_reward(request: web.BaseRequest, body: Any) -> web.Response:
        assert request.path == "/get_reward"
        if request.method == "GET":
            return web.Response(status=405)
        bodies.append(body)
        rewards = [float(query.endswith(label)) for query, label in zip(body["query"], body["labels"], strict=True)]
        return web.json_response({"rewards": rewards, "scores": rewards, "extra_logs": {"dummy_scores": rewards}})

    client = RewardClient([f"openrlhf+{await scripted_http(get_reward)}/get_reward"])
    items = [make_item("a"), make_item("b", "41"), make_item("c", truth={"x": 1}), make_item("d", ground_truth_json="")]
    first, second, *_ = await client.score(items, timeout_s=30)
    # As the executor of OpenRLHF 0.11.2 sends it.
    assert bodies == [
        {
            "query": ["40+2=42", "40+2=41", "40+2=42", "40+2=42"],
            "prompts": ["40+2="] * 4,
            "labels": ["42", "42", '{"x": 1}', ""],
        }
    ]
    assert (first.scored.total, second.scored.total) == (1.0, 0.0)
    assert dict(first.scored.components) == {"scores": 1.0, "dummy_scores": 1.0}
    await client.close()


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"rewards": [1.0, 2.0]},
        {"rewards": ["x"]},
        [],
        {"rewards": [float("nan")]},
        {"rewards": [10**400]},
        {"rewards": [1.0], "scores": [10**400]},
        {"rewards": [1.0], "extra_logs": {"\ud800": [1.0]}},
    ],
)
async def test_an_answer_without_rewards_is_no_zero(answer: Any, scripted_http: Any, make_item: Any) -> None:
    async def get_reward(request: web.BaseRequest, body: Any) -> web.Response:
        return web.json_response(answer)

    client = RewardClient([f"openrlhf+{await scripted_http(get_reward)}"], limits=_ONE_TRY)
    (result,) = await client.score([make_item()], timeout_s=30)
    assert result.error.code in ("endpoint", "nan", "bad_output")
    await client.close()


@pytest.mark.parametrize(
    "answer",
    [{"reward": 10**400}, {"reward": 1, "n": 10**400}, {"reward": 1, "reward_components": {"\ud800": 1.0}}],
)
async def test_a_reward_that_cannot_be_sent_is_an_error(answer: Any, scripted_http: Any, make_item: Any) -> None:
    async def verify(request: web.BaseRequest, body: Any) -> web.Response:
        return web.json_response(answer)

    client = RewardClient([f"nemo-gym+{await scripted_http(verify)}"], limits=_ONE_TRY)
    (result,) = await client.score([make_item()], timeout_s=30)
    assert result.error.code == "bad_output"
    await client.close()


async def test_nemo_gyms_form(scripted_http: Any, make_item: Any) -> None:
    bodies: dict[str, Any] = {}

    async def verify(request: web.BaseRequest, body: Any) -> web.Response:
        if request.method == "GET":
            return web.Response(status=404)
        assert request.path == "/verify"
        text = body["response"]["output"][0]["content"][0]["text"]
        bodies[text] = body
        if text == "broken":
            return web.Response(status=422, text="no such field")
        if text == "masked":
            lost = {"reward": 0.0, "mask_sample": True, "failure_kind": "judge", "failure_reason": "it was away"}
            return web.json_response({**body, **lost})
        reward = float(text == body["expected_answer"])
        parts = {"reward": reward, "mask_sample": False, "steps": 3, "reward_components": {"style": 0.5}}
        return web.json_response({**body, **parts})

    client = RewardClient([f"nemo-gym+{await scripted_http(verify)}"], limits=_ONE_TRY)
    extra = json.dumps({"options": [{"A": "x"}], "number": 7})
    texts = ["42", "41", "masked", "broken"]
    right, wrong, masked, broken = await client.score(
        [make_item(text, text, extra_info_json=extra) for text in texts], timeout_s=30
    )
    assert right.scored.total == 1.0
    assert dict(right.scored.components) == {"steps": 3.0, "style": 0.5}, "fields of the row are no components"
    assert wrong.HasField("scored")
    assert wrong.scored.total == 0.0
    assert (masked.error.code, masked.error.retryable) == ("judge", True)
    assert "it was away" in masked.error.message
    assert broken.error.code == "endpoint"
    assert "HTTP 422" in broken.error.message
    sent = bodies["42"]
    assert sent["responses_create_params"] == {"input": [{"role": "user", "content": "40+2="}]}
    assert (sent["options"], sent["expected_answer"]) == ([{"A": "x"}], "42")
    # NeMo Gym reads the response with a subclass of this type.
    assert Response.model_validate(sent["response"]).output_text == "42"
    await client.close()


async def test_a_server_that_fails_for_all_is_a_failed_call(scripted_http: Any, make_item: Any) -> None:
    async def verify(request: web.BaseRequest, body: Any) -> web.Response:
        return web.Response(status=503)

    client = RewardClient([f"nemo-gym+{await scripted_http(verify)}"], limits=_ONE_TRY)
    results = await client.score([make_item(f"{n}") for n in range(3)], timeout_s=0.5)
    assert {result.error.code for result in results} == {"unreachable"}
    await client.close()


def test_addresses() -> None:
    assert target_of("https://host/base") == "host:443"
    assert target_of("http://[::1]:80/x/") == "[::1]:80"
    assert target_of("openrlhf+http://host:5000/get_reward") == "host:5000"
    assert target_of("host:1") == target_of("grpcs://host:1") == "host:1"
    assert url_of("nemo-gym+https://host/x/") == ("nemo-gym+", "https://host/x")
    assert all(map(is_endpoint, ("grpc://h:1", "http://h", "openrlhf+https://h", "nemo-gym+http://h:1")))
    assert not any(map(is_endpoint, ("qa", "file.py:http", "regex:http://x", "verifiers:gsm8k")))
    for wrong in ("ftp://host:1", "http://user@host/x", "http://host/?q=1", "http://", "openrlhf+grpc://h:1"):
        with pytest.raises(ConfigError, match="reward endpoint"):
            target_of(wrong)
