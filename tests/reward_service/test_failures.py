"""The client's results for servers that die, hang, lie or overload: typed errors, another endpoint, never a score."""

import asyncio
import math
import time
from typing import Any

import grpc
import pytest

from rollmesh.mesh.access.authenticated_channel import AuthenticatedChannel
from rollmesh.mesh.errors import UnauthenticatedError
from rollmesh.protos import membership_pb2, reward_pb2
from rollmesh.reward_service.client.client import CallLimits, LocalScorer, RewardClient
from rollmesh.reward_service.client.transports.grpc_calls import GrpcTransport
from rollmesh.reward_service.scoring.engine import ScoringEngine

CONTEXT = Any


async def hang(request: reward_pb2.ScoreRequest, context: CONTEXT) -> reward_pb2.ScoreResponse:
    await asyncio.sleep(60)
    return reward_pb2.ScoreResponse()


def unused_address() -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"grpc://127.0.0.1:{probe.getsockname()[1]}"


async def test_a_server_killed_in_the_middle_of_a_call_is_replaced(scripted: Any, make_item: Any) -> None:
    doomed, spare = await scripted(hang), await scripted()
    client = RewardClient([doomed.address])
    scoring = asyncio.create_task(client.score([make_item("a"), make_item("b")], timeout_s=30))
    await asyncio.wait_for(doomed.called.wait(), 180)
    client.set_endpoints([doomed.address, spare.address])
    await doomed.kill()
    results = await scoring
    assert [result.scored.total for result in results] == [1.0, 1.0]
    await client.close()


async def test_a_server_that_comes_back_is_used_again(scripted: Any, make_item: Any) -> None:
    server = await scripted()
    client = RewardClient([server.address])
    assert (await client.score([make_item()]))[0].HasField("scored")
    await server.kill()
    scoring = asyncio.create_task(client.score([make_item()], timeout_s=60))
    async with asyncio.timeout(180):
        while "no reward service answers" not in client.present_wait().reason:
            await asyncio.sleep(0.01)
    assert not scoring.done()
    assert client.present_wait().cause == membership_pb2.WAIT_CAUSE_NO_REWARD_SERVICE
    await server.start(server.port)
    assert (await scoring)[0].HasField("scored")
    assert not client.present_wait()
    await client.close()


async def test_a_server_that_is_back_is_not_blamed_while_it_scores(scripted: Any, make_item: Any) -> None:
    server = await scripted()
    client = RewardClient([server.address])
    await client.score([make_item()])
    await server.kill()
    server.called.clear()
    server.behaviour = hang
    scoring = asyncio.create_task(client.score([make_item()], timeout_s=60))
    async with asyncio.timeout(180):
        while not client.present_wait():
            await asyncio.sleep(0.01)
        await server.start(server.port)
        await server.called.wait()
    assert not client.present_wait()
    scoring.cancel()
    await client.close()


async def test_only_a_server_for_which_items_wait_is_blamed(scripted: Any, make_item: Any) -> None:
    slow, gone = await scripted(hang), unused_address()
    client = RewardClient([slow.address], {"code": [gone]})
    (failed,) = await client.score([make_item(data_source="code")], timeout_s=1.0)
    assert gone in failed.error.message
    scoring = asyncio.create_task(client.score([make_item()], timeout_s=60))
    await asyncio.wait_for(slow.called.wait(), 180)
    assert not client.present_wait()
    scoring.cancel()
    await client.close()


async def test_no_one_there_is_a_typed_error_within_the_deadline(make_item: Any) -> None:
    address = unused_address()
    client = RewardClient([address])
    began = time.monotonic()
    async with asyncio.timeout(20):  # not the 30 s of those that name no deadline
        (result,) = await client.score([make_item()], timeout_s=1.0)
    assert time.monotonic() - began > 0.9
    assert result.error.code == "unreachable"
    assert address in result.error.message
    assert result.error.retryable
    await client.close()


class _GrantToRenew:
    """Has nothing to prove itself with, until its grant has been replaced."""

    def __init__(self) -> None:
        self.renewed = False

    def claim(self, _contract: str) -> str:
        if not self.renewed:
            raise UnauthenticatedError("the grant has ended")
        return "a claim"


async def test_a_grant_that_is_over_loses_no_item(scripted: Any, make_item: Any) -> None:
    server = await scripted()
    grant: Any = _GrantToRenew()
    client = RewardClient(
        [server.address],
        connect=lambda address: GrpcTransport(
            AuthenticatedChannel(grpc.aio.insecure_channel(address.removeprefix("grpc://")), grant)
        ),
    )
    (result,) = await client.score([make_item()], timeout_s=1.0)
    assert result.error.code == "unreachable"
    assert result.error.retryable
    assert "the grant has ended" in result.error.message
    scoring = asyncio.create_task(client.score([make_item()], timeout_s=30))
    await asyncio.wait((scoring,), timeout=0.3)
    assert not scoring.done()
    grant.renewed = True
    assert (await scoring)[0].HasField("scored")
    await client.close()


async def test_no_endpoint_yet_waits_and_says_so(scripted: Any, make_item: Any) -> None:
    client = RewardClient()
    (result,) = await client.score([make_item()], timeout_s=0.1)
    assert result.error.code == "unreachable"
    assert "no reward service is known" in result.error.message
    scoring = asyncio.create_task(client.score([make_item()], timeout_s=30))
    await asyncio.sleep(0)
    client.set_endpoints([(await scripted()).address.removeprefix("grpc://")])
    assert (await scoring)[0].HasField("scored")
    await client.close()


async def test_a_hanging_server_costs_one_call_deadline(scripted: Any, introduced: Any, make_item: Any) -> None:
    asked = []

    async def first_hangs(request: reward_pb2.ScoreRequest, context: CONTEXT) -> reward_pb2.ScoreResponse:
        if request.items[0].item_id == "held":
            asked.append(request)
            if len(asked) == 1:
                await asyncio.sleep(60)
        response = reward_pb2.ScoreResponse()
        for item in request.items:
            response.results.add(item_id=item.item_id).scored.total = 1.0
        return response

    servers = [await scripted(first_hangs), await scripted(first_hangs)]
    client = await introduced(servers, limits=CallLimits(timeout_s=2.0))
    (result,) = await client.score([make_item("held")], timeout_s=60)
    assert result.HasField("scored")
    assert len(asked) == 2
    await client.close()


async def test_timeouts_end_after_the_attempts(scripted: Any, make_item: Any) -> None:
    stuck = await scripted(hang)
    client = RewardClient([stuck.address], limits=CallLimits(timeout_s=1.0, attempts=2))
    (result,) = await client.score([make_item()], timeout_s=60)
    assert result.error.code == "timeout"
    assert len(stuck.requests) == 2
    await client.close()


async def test_retryable_errors_are_tried_again_others_not(scripted: Any, make_item: Any) -> None:
    async def flaky(request: reward_pb2.ScoreRequest, context: CONTEXT) -> reward_pb2.ScoreResponse:
        response = reward_pb2.ScoreResponse()
        for item in request.items:
            if item.item_id == "final":
                response.results.add(item_id="final", error=reward_pb2.Error(code="bad_input", message="no"))
            elif len(server.requests) < 3 or item.item_id == "never":
                error = reward_pb2.Error(code="busy", message="later", retryable=True)
                response.results.add(item_id=item.item_id, error=error)
            else:
                response.results.add(item_id=item.item_id).scored.total = 2.0
        return response

    server = await scripted(flaky)
    client = RewardClient([server.address], limits=CallLimits(attempts=3))
    final, late, never = await client.score([make_item(name) for name in ("final", "late", "never")], timeout_s=30)
    assert final.error.code == "bad_input"
    assert late.scored.total == 2.0
    assert never.error.code == "busy"
    assert [sorted(i.item_id for i in r.items) for r in server.requests] == [
        ["final", "late", "never"],
        ["late", "never"],
        ["late", "never"],
    ]
    await client.close()


async def test_answers_that_break_the_contract_are_errors_by_name(
    scripted: Any, make_item: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def liar(request: reward_pb2.ScoreRequest, context: CONTEXT) -> reward_pb2.ScoreResponse:
        r = reward_pb2.ScoreResponse()
        r.results.add(item_id="nan").scored.total = math.nan
        part = r.results.add(item_id="part").scored
        part.components["x"] = math.inf
        r.results.add(item_id="length").scored.per_token.extend([1.0])
        r.results.add(item_id="token").scored.per_token.extend([math.nan, 1.0])
        r.results.add(item_id="twice").scored.total = 1.0
        r.results.add(item_id="twice").scored.total = 0.0
        r.results.add(item_id="nothing")
        r.results.add(item_id="stranger").scored.total = 1.0
        r.results.add(item_id="good").scored.total = 1.0
        return r

    server = await scripted(liar)
    client = RewardClient([server.address], limits=CallLimits(attempts=1))
    names = ["nan", "part", "length", "token", "twice", "nothing", "missing", "good"]
    results = await client.score([make_item(name, "42") for name in names], timeout_s=30)
    codes = {r.item_id: r.error.code if r.HasField("error") else r.WhichOneof("outcome") for r in results}
    assert codes == {
        "nan": "nan",
        "part": "nan",
        "length": "per_token_length",
        "token": "nan",
        "twice": "duplicate_result",
        "nothing": "no_outcome",
        "missing": "missing_result",
        "good": "scored",
    }
    assert "answered for 1 items that were not in the call, or again, such as 'stranger'" in caplog.text
    await client.close()


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (grpc.StatusCode.UNIMPLEMENTED, "Reward server"),
        (grpc.StatusCode.UNAUTHENTICATED, "join the mesh"),
        (grpc.StatusCode.INTERNAL, "INTERNAL"),
    ],
)
async def test_a_call_that_fails_as_a_whole(scripted: Any, make_item: Any, status: Any, words: str) -> None:
    async def refuse(request: reward_pb2.ScoreRequest, context: CONTEXT) -> reward_pb2.ScoreResponse:
        await context.abort(status, "no")
        raise AssertionError

    server = await scripted(refuse)
    client = RewardClient([server.address], limits=CallLimits(attempts=2))
    (result,) = await client.score([make_item()], timeout_s=30)
    assert result.error.code == "endpoint"
    assert words in result.error.message
    assert len(server.requests) == 2
    await client.close()


async def test_requests_that_are_too_large_are_split(scripted: Any, make_item: Any) -> None:
    async def small_only(request: reward_pb2.ScoreRequest, context: CONTEXT) -> reward_pb2.ScoreResponse:
        if len(request.items) > 2:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too large")
        response = reward_pb2.ScoreResponse()
        for item in request.items:
            response.results.add(item_id=item.item_id).scored.total = 1.0
        return response

    server = await scripted(small_only)
    client = RewardClient([server.address])
    results = await client.score([make_item(str(n)) for n in range(8)], timeout_s=30)
    assert all(result.HasField("scored") for result in results)
    await client.close()


async def test_a_closed_client_answers_with_errors(scripted: Any, make_item: Any) -> None:
    server = await scripted(hang)
    client = RewardClient([server.address])
    scoring = asyncio.create_task(client.score([make_item()], timeout_s=30))
    await asyncio.wait_for(server.called.wait(), 180)
    await client.close()
    assert (await scoring)[0].error.code == "closed"
    assert (await client.score([make_item()], timeout_s=30))[0].error.code == "closed"


async def test_an_item_in_the_pause_before_its_next_try_is_answered_at_the_close(
    scripted: Any, make_item: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmesh.reward_service.client.dispatcher._RETRY_BASE_S", 600.0)
    monkeypatch.setattr("rollmesh.reward_service.client.dispatcher._RETRY_LONGEST_S", 600.0)

    async def one_is_busy(request: reward_pb2.ScoreRequest, context: CONTEXT) -> reward_pb2.ScoreResponse:
        response = reward_pb2.ScoreResponse()
        for item in request.items:
            if item.item_id == "busy":
                response.results.add(item_id="busy", error=reward_pb2.Error(code="busy", retryable=True))
            else:
                response.results.add(item_id=item.item_id).scored.total = 1.0
        return response

    server = await scripted(one_is_busy)
    client = RewardClient([server.address], limits=CallLimits(attempts=3))
    names = ("busy", "scored")
    busy, scored = (asyncio.create_task(client.score([make_item(name)], timeout_s=60)) for name in names)
    assert (await asyncio.wait_for(scored, 180))[0].HasField("scored")
    assert len(server.requests) == 1, "both items were answered by one call"
    await client.close()
    assert (await asyncio.wait_for(busy, 60))[0].error.code == "closed"


async def test_a_cancelled_caller_leaves_nothing_behind(scripted: Any, make_item: Any) -> None:
    client = RewardClient()
    scoring = asyncio.create_task(client.score([make_item("gone")], timeout_s=30))
    await asyncio.sleep(0)
    scoring.cancel()
    await asyncio.gather(scoring, return_exceptions=True)
    server = await scripted()
    client.set_endpoints([server.address])
    assert (await client.score([make_item("stays")], timeout_s=30))[0].HasField("scored")
    assert [item.item_id for request in server.requests for item in request.items] == ["stays"]
    await client.close()


async def test_by_source_with_a_local_default(scripted: Any, make_item: Any) -> None:
    server = await scripted()
    client = RewardClient(by_data_source={"far": [server.address]}, default=LocalScorer(ScoringEngine(["exact_match"])))
    near, far = await client.score([make_item("n", "41"), make_item("f", "41", data_source="far")], timeout_s=30)
    assert near.scored.total == 0.0
    assert far.scored.total == 1.0
    assert len(server.requests) == 1
    await client.close()


async def test_a_slow_scorer_is_a_retryable_timeout_through_the_wire(serve: Any, make_item: Any) -> None:
    async def slow(solution_str: str, ground_truth: str) -> float:
        await asyncio.sleep(30)
        return 0.0

    client = RewardClient([await serve(slow, call_timeout_s=0.1)], limits=CallLimits(attempts=2))
    (result,) = await client.score([make_item()], timeout_s=30)
    assert result.error.code == "timeout"
    assert result.error.retryable
    assert "slow" in result.error.message
    await client.close()


def test_engine_refuses_unknown_functions_at_the_start() -> None:
    from rollmesh.mesh.errors import RewardError

    with pytest.raises(RewardError, match="exact_match"):
        ScoringEngine(["exact_matc"])
