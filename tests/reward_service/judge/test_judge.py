"""The judge against a real endpoint that refuses, hangs and lies: each failure is typed, and none is a score."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollmesh.mesh.config.load import load_config
from rollmesh.mesh.config.scorers.judge import JudgeSection
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.runtime.service import Shutdown
from rollmesh.protos import membership_pb2_grpc
from rollmesh.reward_service.client.client import RewardClient, build_scorer
from rollmesh.reward_service.client.dispatcher import CallLimits
from rollmesh.reward_service.judge.endpoint import Address
from rollmesh.reward_service.judge.evidence import Evidence
from rollmesh.reward_service.judge.judge import Judge
from rollmesh.reward_service.judge.spent import read_spent
from rollmesh.reward_service.outcomes import Failed, RewardItem, Scored
from rollmesh.reward_service.scoring.engine import ScoringEngine
from rollmesh.reward_service.server.server import RewardServer
from rollmesh.reward_service.server.service import serve
from tests.certificates import Authority
from tests.reward_service.judge.conftest import BRIEF, LONG_S, Endpoint, completion, shown, verdict
from tests.reward_service.server.test_service import Mesh


async def test_scores_become_rewards_on_the_scale(judge: Any, endpoint: Endpoint) -> None:
    results = await judge()("a", "abcde", "abcdefghij")
    assert [result.scored.total for result in results] == pytest.approx([0.1, 0.5, 1.0])
    assert dict(results[1].scored.components) == {"judge": 0.5, "score": 5.0}
    (body, *_) = endpoint.bodies
    assert endpoint.paths[0] == "/v1/chat/completions"
    assert (body["model"], body["max_completion_tokens"]) == ("m", 512)
    assert body["response_format"]["json_schema"]["strict"] is True
    assert body["response_format"]["json_schema"]["schema"]["required"] == ["reason", "score"]


async def test_settings_reach_the_endpoint(judge: Any, endpoint: Endpoint, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("sk-of-the-judge\n")
    settings = {"structured": "none", "temperature": 0.7, "max_tokens": 9, "options": {"reasoning_effort": "low"}}
    await judge(api_key_file=key, **settings)("abc")
    (body,) = endpoint.bodies
    assert "response_format" not in body
    assert (body["temperature"], body["max_completion_tokens"], body["reasoning_effort"]) == (0.7, 9, "low")
    assert endpoint.headers[0]["Authorization"] == "Bearer sk-of-the-judge"


async def test_votes_are_asked_and_reduced(judge: Any, endpoint: Endpoint) -> None:
    async def by_seed(body: dict[str, Any]) -> web.StreamResponse:
        return verdict([1.0, 2.0, 9.0][body["seed"]])

    endpoint.behaviour = by_seed
    (result,) = await judge(votes=3, combine="median", temperature=1.0)("abc")
    assert result.scored.total == pytest.approx(0.2)
    assert result.scored.components["spread"] == 8.0
    assert len(endpoint.bodies) == 3


async def test_equal_responses_are_asked_about_once(judge: Any, endpoint: Endpoint, totals: Any) -> None:
    score = judge()
    assert totals(await score("abc", "abc", "abc")) == pytest.approx([0.3] * 3)
    assert totals(await score("abc")) == pytest.approx([0.3])
    assert len(endpoint.bodies) == 1


async def test_an_endpoint_that_refuses_every_other_request_costs_no_item(
    judge: Any, endpoint: Endpoint, totals: Any
) -> None:
    asked = Counter[str]()

    async def refuse_first(body: dict[str, Any]) -> web.StreamResponse:
        asked[shown(body)] += 1
        if asked[shown(body)] == 1:
            return web.Response(status=429, text="slow down")
        return verdict(5.0)

    endpoint.behaviour = refuse_first
    assert totals(await judge()(*(f"response {n}" for n in range(16)))) == [0.5] * 16
    assert set(asked.values()) == {2}


async def test_an_endpoint_without_room_leaves_items_not_begun(judge: Any, endpoint: Endpoint, totals: Any) -> None:
    async def refuse(_body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=429, headers={"Retry-After": "30"})

    endpoint.behaviour = refuse
    score = judge(concurrency=1, **BRIEF)
    results = await score("a", "b")
    assert totals(results) == ["not_begun"] * 2
    assert all(result.error.retryable for result in results)
    seen = len(endpoint.bodies)
    # The pause counts for all requests of the process.
    assert totals(await score("c")) == ["not_begun"]
    assert len(endpoint.bodies) == seen


async def test_a_busy_judge_slows_a_group_and_loses_none_of_it(
    endpoint: Endpoint, base_url: str, make_item: Any, totals: Any
) -> None:
    async def refuse_for_a_while(_body: dict[str, Any]) -> web.StreamResponse:
        return verdict(5.0) if len(endpoint.bodies) > 12 else web.Response(status=429)

    endpoint.behaviour = refuse_for_a_while
    section = JudgeSection(base_url=base_url, model="m", **BRIEF)
    engine = ScoringEngine([Judge(section, call_timeout_s=LONG_S)], call_timeout_s=LONG_S)
    server = RewardServer(engine, timeout_s=2 * LONG_S)
    client = RewardClient([f"127.0.0.1:{await server.start()}"], limits=CallLimits(2 * LONG_S, 1, 2 * LONG_S))
    try:
        items = [make_item(str(n), f"response {n}") for n in range(4)]
        assert totals(await client.score(items, timeout_s=2 * LONG_S)) == [0.5] * 4
    finally:
        await client.close()
        await server.stop(0)


async def test_services_and_generators_find_it_in_the_configuration(
    endpoint: Endpoint, base_url: str, make_item: Any, totals: Any, tmp_path: Path
) -> None:
    reward = {"functions": ["judge"], "judge": {"base_url": base_url, "model": "m"}}
    given = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}}
    near = build_scorer(load_config({**given, "reward": {**reward, "in_process": True}}))
    assert totals(await near.score([make_item("a", "abc")])) == pytest.approx([0.3])
    await near.close()

    shutdown, ready = Shutdown(), tmp_path / "ready"
    config = load_config({**given, "reward": reward})
    running = asyncio.create_task(serve(config, shutdown, host="127.0.0.1", port=0, mesh=None, ready_file=ready))
    async with asyncio.timeout(LONG_S):
        while not ready.exists():
            assert not running.done()
            await asyncio.sleep(0.01)
    far = RewardClient([json.loads(ready.read_text())["address"]])
    assert totals(await far.score([make_item("a", "abcd")], timeout_s=LONG_S)) == pytest.approx([0.4])
    await far.close()
    shutdown.request("enough")
    assert await running == 0
    assert len(endpoint.bodies) == 2


async def test_a_service_of_a_mesh_asks_once_it_knows_its_share(
    base_url: str, make_item: Any, totals: Any, tmp_path: Path
) -> None:
    servicer, mesh = Mesh(), grpc.aio.server()
    membership_pb2_grpc.add_MembershipServicer_to_server(servicer, mesh)
    address = f"127.0.0.1:{mesh.add_insecure_port('127.0.0.1:0')}"
    await mesh.start()
    (tmp_path / "run").mkdir()
    reward = {"functions": ["judge"], "judge": {"base_url": base_url, "model": "m", "budget_tokens": 10_000}}
    run = {"name": "run", "dir": str(tmp_path)}
    config = load_config({"run": run, "model": {"path": "m"}, "data": {"train": "t.jsonl"}, "reward": reward})
    shutdown, ready = Shutdown(), tmp_path / "ready"
    running = asyncio.create_task(serve(config, shutdown, host="127.0.0.1", port=0, mesh=address, ready_file=ready))
    async with asyncio.timeout(LONG_S):
        while not ready.exists():
            assert not running.done()
            await asyncio.sleep(0.01)
        client = RewardClient([json.loads(ready.read_text())["address"]], limits=CallLimits(LONG_S, 1, LONG_S))
        assert totals(await client.score([make_item("a", "abcd")], timeout_s=LONG_S)) == pytest.approx([0.4])
    (member,) = servicer.members.values()
    assert member.gauges["judge_share"] == 1.0
    await client.close()
    shutdown.request("enough")
    assert await running == 0
    assert read_spent(tmp_path / "run")[member.member_id].tokens > 0
    await mesh.stop(0)


async def test_only_what_lacks_a_verdict_is_asked_again(judge: Any, endpoint: Endpoint, totals: Any) -> None:
    busy = True

    async def refuse_long_ones(body: dict[str, Any]) -> web.StreamResponse:
        if busy and len(shown(body)) > 1:
            return web.Response(status=429, headers={"Retry-After": "0.3"})
        return verdict(5.0)

    endpoint.behaviour = refuse_long_ones
    score = judge(**BRIEF)
    assert totals(await score("a", "long")) == [0.5, "not_begun"]
    busy = False
    while totals(results := await score("a", "long"))[1] == "not_begun":
        assert totals(results)[0] == 0.5
    assert totals(results) == [0.5, 0.5]
    assert sum(shown(body) == "a" for body in endpoint.bodies) == 1


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_faults_of_the_endpoint_are_retryable(judge: Any, endpoint: Endpoint, totals: Any, status: int) -> None:
    async def fail(_body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=status)

    endpoint.behaviour = fail
    (result,) = await judge(**BRIEF)("a")
    assert (result.error.code, result.error.retryable) == ("judge_unavailable", True)
    assert str(status) in result.error.message


async def test_a_closed_port_is_retryable(judge: Any) -> None:
    with socket.socket() as bound:  # and it does not listen
        bound.bind(("127.0.0.1", 0))
        (result,) = await judge(base_url=f"http://127.0.0.1:{bound.getsockname()[1]}/v1", **BRIEF)("a")
    assert (result.error.code, result.error.retryable) == ("judge_unavailable", True)


async def test_an_endpoint_that_hangs_is_retryable(endpoint: Endpoint, base_url: str) -> None:
    endpoint.behaviour = endpoint.hang
    judge = Judge(JudgeSection(base_url=base_url, model="m", timeout_s=0.5), call_timeout_s=0.56)
    (outcome,) = await judge([RewardItem("a", "g", "s", "p", "r")])
    assert isinstance(outcome, Failed)
    assert (outcome.code, outcome.retryable) == ("judge_unavailable", True)
    assert "no answer within 0.5 s" in outcome.message


async def test_a_wrong_answer_is_repaired_once(judge: Any, endpoint: Endpoint, totals: Any) -> None:
    async def learn(body: dict[str, Any]) -> web.StreamResponse:
        return verdict(4.0) if len(body["messages"]) == 4 else completion("I would say 4 of 10.")

    endpoint.behaviour = learn
    assert totals(await judge()("a")) == pytest.approx([0.4])
    (_, repair) = endpoint.bodies
    assert repair["messages"][2] == {"role": "assistant", "content": "I would say 4 of 10."}
    assert "no JSON object" in repair["messages"][3]["content"]


@pytest.mark.parametrize("content", ['{"score": ', '{"score": 1000}', '{"points": 3}'])
async def test_wrong_answers_are_no_scores(judge: Any, endpoint: Endpoint, content: str) -> None:
    async def lie(_body: dict[str, Any]) -> web.StreamResponse:
        return completion(content)

    endpoint.behaviour = lie
    (result,) = await judge()("a")
    assert (result.error.code, result.error.retryable) == ("judge_answer", True)
    assert len(endpoint.bodies) == 2


@pytest.mark.parametrize(
    "body", ["{", "[]", "{}", '{"choices": []}', '{"choices": [{"message": null}]}', "[" * 100_000, "\xff"]
)
async def test_bodies_that_are_no_completions_are_errors(judge: Any, endpoint: Endpoint, body: str) -> None:
    async def lie(_body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=body.encode("latin-1"), content_type="application/json")

    endpoint.behaviour = lie
    (result,) = await judge()("a")
    assert (result.error.code, result.error.retryable) == ("judge_answer", True)


async def test_any_text_can_be_judged(judge: Any, totals: Any) -> None:
    assert totals(await judge()("\0 {} \u2028", "", truth="\ud800")) == pytest.approx([0.6, 0.0])


async def test_answers_are_read_up_to_a_bound(judge: Any, endpoint: Endpoint) -> None:
    async def flood(_body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(body=b" " * (5 << 20))

    endpoint.behaviour = flood
    (result,) = await judge()("a")
    assert result.error.code == "judge_answer"
    assert "longer than" in result.error.message


async def test_a_refusal_is_final_and_repeats_no_key(judge: Any, endpoint: Endpoint, tmp_path: Path) -> None:
    async def refuse(_body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=401, text="wrong key: sk-of-the-judge")

    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("sk-of-the-judge")
    endpoint.behaviour = refuse
    (result,) = await judge(api_key_file=key)("a")
    assert (result.error.code, result.error.retryable) == ("judge_refused", False)
    assert "sk-of" not in result.error.message
    assert len(endpoint.bodies) == 1


async def test_redirects_are_not_followed(judge: Any, endpoint: Endpoint, base_url: str) -> None:
    async def lead_away(_body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": f"{base_url}/elsewhere"})

    endpoint.behaviour = lead_away
    (result,) = await judge()("a")
    assert result.error.code == "judge_refused"
    assert endpoint.paths == ["/v1/chat/completions"]


async def test_a_spent_budget_is_an_error_of_its_own(judge: Any, endpoint: Endpoint, totals: Any) -> None:
    async def costly(_body: dict[str, Any]) -> web.StreamResponse:
        return verdict(5.0, prompt_tokens=900, completion_tokens=100)

    endpoint.behaviour = costly
    score = judge(budget_tokens=1100)
    assert totals(await score("a")) == [0.5]
    (result,) = await score("b")
    assert (result.error.code, result.error.retryable) == ("judge_budget", False)
    assert "1000 of 1100 tokens" in result.error.message
    assert len(endpoint.bodies) == 1


async def test_a_judge_without_room_says_so(endpoint: Endpoint, base_url: str) -> None:
    judge = Judge(
        JudgeSection(base_url=base_url, model="m", timeout_s=89.9, requests_per_minute=1), call_timeout_s=100.0
    )
    engine = ScoringEngine([judge], workers=1)
    try:
        await judge([RewardItem("a", "g", "s", "p", "r")])
        assert not engine.present_wait()
        (outcome,) = await judge([RewardItem("b", "g", "s", "p", "other")])
        assert isinstance(outcome, Failed)
        assert outcome.code == "not_begun"
        assert engine.present_wait().reason.startswith("judge: its limits allow the next request in ")
    finally:
        await engine.close()
    assert len(endpoint.bodies) == 1


async def test_requests_in_progress_are_limited(judge: Any, endpoint: Endpoint, totals: Any) -> None:
    assert len(set(totals(await judge(concurrency=2)(*("a" * n for n in range(1, 9)))))) == 8
    assert endpoint.most_running <= 2


async def test_a_slow_request_is_sent_twice(endpoint: Endpoint, base_url: str) -> None:
    async def hang_first(body: dict[str, Any]) -> web.StreamResponse:
        return await endpoint.hang(body) if len(endpoint.bodies) == 1 else verdict(5.0)

    endpoint.behaviour = hang_first
    judge = Judge(JudgeSection(base_url=base_url, model="m", timeout_s=60.0), call_timeout_s=100.0)
    for _ in range(20):
        judge.accounts.hedging.begin()
        judge.accounts.hedging.answered(0.01)
    (outcome,) = await judge([RewardItem("a", "g", "s", "p", "r")])
    assert isinstance(outcome, Scored)
    assert outcome.total == 0.5
    assert len(endpoint.bodies) == 2


async def test_pairs_are_compared_in_both_orders(judge: Any, endpoint: Endpoint, totals: Any) -> None:
    async def longest(body: dict[str, Any]) -> web.StreamResponse:
        first, second = len(shown(body, "first")), len(shown(body, "second"))
        won = "first" if first > second else "second" if second > first else "tie"
        return completion(json.dumps({"reason": "longer", "winner": won}))

    endpoint.behaviour = longest
    results = await judge(mode="pairs")("aa", "aaa", "a", "aa")
    assert totals(results) == pytest.approx([0.5, 1.0, 0.0, 0.5])
    assert results[0].scored.components["order_agreement"] == 1.0
    # The two equal responses are a tie without a question, and their questions about others are the same.
    assert len(endpoint.bodies) == 6


async def test_a_judge_that_favours_the_first_decides_nothing(judge: Any, endpoint: Endpoint, totals: Any) -> None:
    async def first(_body: dict[str, Any]) -> web.StreamResponse:
        return completion(json.dumps({"reason": "", "winner": "first"}))

    endpoint.behaviour = first
    results = await judge(mode="pairs", opponents=2)("a", "b", "c", "d", "e")
    assert totals(results) == [0.5] * 5
    assert results[0].scored.components["order_agreement"] == 0.0
    assert len(endpoint.bodies) == 10


async def test_a_pair_without_a_verdict_leaves_its_group_without_rewards(
    judge: Any, endpoint: Endpoint, totals: Any
) -> None:
    async def not_about_b(body: dict[str, Any]) -> web.StreamResponse:
        if "b" in (shown(body, "first"), shown(body, "second")):
            return web.Response(status=500)
        return completion(json.dumps({"reason": "", "winner": "tie"}))

    endpoint.behaviour = not_about_b
    assert totals(await judge(mode="pairs", **BRIEF)("a", "b", "c")) == ["judge_unavailable"] * 3


async def test_a_single_response_has_no_pair(judge: Any, endpoint: Endpoint) -> None:
    (result,) = await judge(mode="pairs")("a")
    assert result.HasField("unscorable")
    assert endpoint.bodies == []


async def test_verdicts_are_kept_with_their_reasons(judge: Any, tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"
    scored = await judge(evidence_file=file)("abc", "abcd")
    assert [result.scored.evidence for result in scored] == ["3: because", "4: because"]
    async with asyncio.timeout(LONG_S):
        while not file.exists() or file.read_text().count("\n") < 2:
            await asyncio.sleep(0.01)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert sorted((record["item_id"], record["value"], record["reason"]) for record in records) == [
        ("0", 3.0, "because"),
        ("1", 4.0, "because"),
    ]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_evidence_goes_into_no_file_that_others_read(tmp_path: Path) -> None:
    file = tmp_path / "verdicts.jsonl"
    file.touch(0o644)
    file.chmod(0o666)
    with pytest.raises(ConfigError, match=r"evidence_file .* other users"):
        Evidence(file)


async def test_evidence_that_cannot_be_kept_stops_no_scoring(judge: Any, totals: Any, tmp_path: Path) -> None:
    assert totals(await judge(evidence_file=tmp_path / "absent" / "file")("abc")) == pytest.approx([0.3])


async def test_certificates_are_verified(judge: Any, endpoint: Endpoint, totals: Any, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*authority.certify("judge"))
    application = web.Application()
    application.router.add_post("/v1/chat/completions", endpoint.answer)
    server = TestServer(application, scheme="https")
    await server.start_server(ssl=context)
    url = f"https://127.0.0.1:{server.port}/v1"
    try:
        (result,) = await judge(base_url=url)("abc")
        assert (result.error.code, result.error.retryable) == ("judge_refused", False)
        assert "ca_file" in result.error.message
        assert totals(await judge(base_url=url, ca_file=authority.pem)("abc")) == pytest.approx([0.3])
    finally:
        await server.close()


@pytest.mark.parametrize(
    ("url", "mode", "text", "message"),
    [
        ("http://judge.example/v1", 0o600, "sk", "in clear"),
        ("https://judge.example/v1", 0o644, "sk", "other users"),
        ("https://judge.example/v1", 0o600, "sk\nsk", "more than a key"),
        ("https://judge.example/v1", 0o600, "", "empty"),
    ],
)
def test_keys_that_would_be_told_to_others_are_refused(
    tmp_path: Path, url: str, mode: int, text: str, message: str
) -> None:
    key = tmp_path / "key"
    key.write_text(text)
    key.chmod(mode)
    with pytest.raises(ConfigError, match=message):
        Address.of(JudgeSection(base_url=url, model="m", api_key_file=key))


async def test_costs_and_versions_are_told(judge: Any, endpoint: Endpoint, base_url: str) -> None:
    async def costly(_body: dict[str, Any]) -> web.StreamResponse:
        return verdict(5.0, prompt_tokens=1_000_000, completion_tokens=500_000)

    endpoint.behaviour = costly
    prices = {"prompt_price": 1.0, "answer_price": 4.0}
    score = judge(**prices)
    assert [result.scored.cost for result in await score("a", "b")] == [3.0, 3.0]
    # Kept verdicts cost nothing again.
    assert [result.scored.cost for result in await score("a", "a")] == [0.0, 0.0]
    compared = await judge(mode="pairs", structured="none", **prices)("a", "a")
    assert [result.scored.cost for result in compared] == [0.0, 0.0]

    versions = [
        Judge(JudgeSection(base_url=base_url, **given), call_timeout_s=LONG_S).version
        for given in ({"model": "m"}, {"model": "m", "concurrency": 3}, {"model": "n"}, {"model": "m", "votes": 2})
    ]
    assert versions[0] == versions[1]
    assert len(set(versions)) == 3
    engine = ScoringEngine([Judge(JudgeSection(base_url=base_url, model="m"), call_timeout_s=LONG_S)])
    assert engine.scorers == {"judge": versions[0]}
    await engine.close()


async def test_pairs_tell_their_reasons_and_share_their_cost(judge: Any, endpoint: Endpoint) -> None:
    async def first_wins(_body: dict[str, Any]) -> web.StreamResponse:
        content = json.dumps({"reason": "it is in front", "winner": "first"})
        return completion(content, prompt_tokens=1_000_000, completion_tokens=0)

    endpoint.behaviour = first_wins
    one, two = await judge(mode="pairs", prompt_price=1.0, answer_price=1.0)("a", "b")
    assert [one.scored.cost, two.scored.cost] == [1.0, 1.0]
    assert one.scored.evidence == "with 1, first: it is in front\nwith 1, second: it is in front"
    assert two.scored.evidence == "with 0, second: it is in front\nwith 0, first: it is in front"


def test_all_on_which_a_verdict_depends_is_in_its_version(tmp_path: Path) -> None:
    template = tmp_path / "template.yaml"
    template.write_text("user: 'Is {response} good?'\n")

    def version(**settings: Any) -> str | None:
        section = JudgeSection(base_url="http://127.0.0.1:9/v1", model="m", **settings)
        return Judge(section, call_timeout_s=8.0).cache_version

    assert version() == version(concurrency=3)
    assert len({version(), version(votes=3), version(scale=(0, 1)), version(template=template)}) == 4
    assert version(mode="pairs") is None
