"""A reward that is merely slow makes its callers wait; what hangs ends by itself, and takes no other with it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rollmesh.mesh.config.network import SecuritySection
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.call_times import CallTimes
from rollmesh.reward_service.client.client import CallLimits, LocalScorer, RewardClient, RewardScorer
from rollmesh.reward_service.client.endpoint import RewardEndpoint, connector
from rollmesh.reward_service.client.tickets import Ticket
from rollmesh.reward_service.composition.plan import Composition
from rollmesh.reward_service.outcomes import Failed, Scored, not_begun
from rollmesh.reward_service.scoring.engine import ScoringEngine
from rollmesh.reward_service.workers.cpu_effort import CpuEffort

# One worker takes longer than a call may last, and than a response waits where no one answers.
_ITEMS, _EACH_S = 28, 0.1
_WAIT_S = 2.5


def nap(solution_str: str, ground_truth: str) -> float:
    time.sleep(_EACH_S)
    return 1.0


async def nap_async(solution_str: str, ground_truth: str) -> float:
    await asyncio.sleep(_EACH_S)
    return 1.0


@pytest.fixture(params=["service", "here", "threads"])
async def slow_scorer(request: Any, serve: Any) -> AsyncIterator[RewardScorer]:
    path = f"{Path(__file__)}:nap"
    scorer: RewardScorer
    if request.param == "service":
        address = await serve(path, workers=1, call_timeout_s=1.4, timeout_s=2.0)
        scorer = RewardClient([address], limits=CallLimits(timeout_s=2.2, wait_s=_WAIT_S))
    else:
        function = path if request.param == "here" else nap
        scorer = LocalScorer(ScoringEngine([function], workers=1, call_timeout_s=0.5), wait_s=_WAIT_S)
    await scorer.start()
    yield scorer
    await scorer.close()


async def test_a_slow_reward_fails_nothing(slow_scorer: RewardScorer, make_item: Any) -> None:
    items = [make_item(str(number), group_id=f"g{number % 3}") for number in range(_ITEMS)]
    results = await slow_scorer.score(items)
    assert [result.scored.total for result in results] == [1.0] * _ITEMS, results


async def test_a_server_that_is_given_too_much_gets_less_until_it_answers(scripted: Any, make_item: Any) -> None:
    async def two_at_most(request: reward_pb2.ScoreRequest, _context: Any) -> reward_pb2.ScoreResponse:
        if len(request.items) > 2:
            await asyncio.sleep(60)
        response = reward_pb2.ScoreResponse()
        for item in request.items:
            response.results.add(item_id=item.item_id).scored.total = 1.0
        return response

    server = await scripted(two_at_most)
    client = RewardClient([server.address], limits=CallLimits(timeout_s=0.3, attempts=1, wait_s=30.0))
    results = await client.score([make_item(str(number)) for number in range(16)])
    assert [result.WhichOneof("outcome") for result in results] == ["scored"] * 16, results
    await client.close()


async def test_a_server_that_answers_no_first_call_in_time_loses_nothing(scripted: Any, make_item: Any) -> None:
    """One item after the other, and no more patience than for a call and a half."""
    turn = asyncio.Lock()

    async def one_by_one(request: reward_pb2.ScoreRequest, _context: Any) -> reward_pb2.ScoreResponse:
        response = reward_pb2.ScoreResponse()
        for item in request.items:
            async with turn:
                await asyncio.sleep(0.08)
            response.results.add(item_id=item.item_id).scored.total = 1.0
        return response

    server = await scripted(one_by_one)
    client = RewardClient([server.address], limits=CallLimits(timeout_s=1.6, attempts=3, wait_s=2.4))
    groups = [[make_item(f"{group}-{item}", group_id=f"g{group}") for item in range(8)] for group in range(5)]
    found = await asyncio.gather(*map(client.score, groups))
    assert [result.WhichOneof("outcome") for results in found for result in results] == ["scored"] * 40
    await client.close()


async def test_what_hangs_ends_alone_among_those_that_were_sent_with_it(scripted: Any, make_item: Any) -> None:
    async def poisoned(request: reward_pb2.ScoreRequest, _context: Any) -> reward_pb2.ScoreResponse:
        response = reward_pb2.ScoreResponse()
        for item in request.items:
            if item.item_id == "3":
                await asyncio.sleep(60)
            response.results.add(item_id=item.item_id).scored.total = 1.0
        return response

    server = await scripted(poisoned)
    client = RewardClient([server.address], limits=CallLimits(timeout_s=0.3, attempts=2, wait_s=30.0))
    results = await client.score([make_item(str(number)) for number in range(8)])
    assert [result.error.code for result in results] == ["", "", "", "timeout", "", "", "", ""]
    await client.close()


async def test_more_workers_come_where_they_wait_for_something(make_item: Any, tmp_path: Path) -> None:
    """Three calls are under way at once, although one worker is all that would be worth computing with."""
    import os

    mine = tmp_path / "mine.py"
    mine.write_text("def score(solution_str, ground_truth): return float(len(open(solution_str).read()))\n")
    items = []
    for number in range(3):
        os.mkfifo(tmp_path / str(number))
        items.append(make_item(str(number), str(tmp_path / str(number))))
    scorer = LocalScorer(
        ScoringEngine([f"{mine}:score"], workers=1, waiting_workers=3, call_timeout_s=60.0), wait_s=90.0
    )
    scoring = asyncio.create_task(scorer.score(items))
    for number in (2, 1, 0):  # who opens the other end waits until the last of them is called
        await asyncio.wait_for(asyncio.to_thread((tmp_path / str(number)).write_text, "x"), 60.0)
    assert [result.scored.total for result in await scoring] == [1.0] * 3
    await scorer.close()


def test_busy_workers_are_idle_where_they_take_no_processor_time() -> None:
    effort = CpuEffort()
    assert not effort.is_waiting({1: 5.0}, 10.0)
    assert not effort.is_waiting({1: 5.9, 2: 0.0}, 11.0), "others than before"
    assert not effort.is_waiting({1: 6.8, 2: 0.1}, 12.0), "one of two computes"
    assert effort.is_waiting({1: 6.9, 2: 0.2}, 13.0)
    assert not effort.is_waiting({1: 6.9, 2: 0.2}, 13.1), "too soon to say"
    assert not effort.is_waiting({}, 14.0)


def test_what_is_begun_gets_its_whole_time() -> None:
    times = CallTimes.within(20.0, 8.0)
    assert times.deadline - times.begin_by > 8.0
    short = CallTimes.within(5.0, 8.0)
    assert short.deadline - short.begin_by == pytest.approx(2.5)


async def test_an_endpoint_gets_as_much_as_it_could_begin_and_then_more() -> None:
    endpoint = RewardEndpoint("grpc://127.0.0.1:1", connector(SecuritySection()))
    endpoint.described = True
    assert endpoint.free_items == math.inf
    endpoint.begin(64, 0.0)
    endpoint.narrow_window(14)
    endpoint.end(64)
    assert endpoint.free_items == 14
    endpoint.begin(14, 1.0)
    assert endpoint.ready_at(2.0) == math.inf
    endpoint.on_success(14)
    endpoint.end(14)
    assert (endpoint.free_items, endpoint.ready_at(2.0)) == (28, 2.0)
    endpoint.begin(16, 3.0)
    endpoint.on_timeout(16)
    endpoint.end(16)
    assert (endpoint.free_items, endpoint.max_items) == (2, 8)
    await endpoint.close()


async def test_time_counts_against_an_item_only_while_no_one_answers_or_since_it_failed(make_item: Any) -> None:
    ticket = Ticket([make_item("waits"), make_item("fails")], began=0.0)
    waits, fails = ticket.entries
    why: Callable[[], tuple[str, str]] = lambda: ("unreachable", "no one")  # noqa: E731
    assert ticket.expire(29.0, 30.0, heard_at=-math.inf, why=why) == 30.0
    assert ticket.expire(40.0, 30.0, heard_at=39.0, why=why) == 69.0
    fails.record_failure("unreachable", "lost", retryable=True, address="a", now=40.0)
    fails.record_failure("unreachable", "lost", retryable=True, address="a", now=65.0)
    assert ticket.expire(69.0, 30.0, heard_at=68.0, why=why) == 70.0
    assert ticket.expire(70.0, 30.0, heard_at=69.5, why=why) == 99.5
    assert (waits.result, fails.result is not None) == (None, True)
    ticket.expire(99.5, 30.0, heard_at=69.5, why=why)
    assert waits.result is not None
    assert waits.result.error.code == "unreachable"


def test_a_failure_counts_for_more_than_what_was_not_begun() -> None:
    failed = Failed("exception", "no")
    assert Composition(["a", "b", "c"]).compose([not_begun("busy"), failed, Scored(1.0)]) == failed
    assert Composition(["a", "b"]).compose([Scored(1.0), not_begun("busy")]) == not_begun("busy")
