"""A server's own description is obeyed: parts of items, sizes, and the time of the next try."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from rollmesh.protos import reward_pb2, reward_pb2_grpc
from rollmesh.reward_service.client.client import CallLimits, LocalScorer, RewardClient
from rollmesh.reward_service.client.outgoing import Wants, outgoing
from rollmesh.reward_service.client.validation import contract_fault
from rollmesh.reward_service.outcomes import RewardItem
from rollmesh.reward_service.scoring.engine import ScoringEngine


class Details:
    """Counts how often each part is asked for."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def messages_json(self) -> str:
        self.made.append("messages")
        return '[{"role": "user", "content": "40+2="}]'

    def token_ends(self) -> Sequence[int]:
        self.made.append("ends")
        return [1, 2]

    def images(self) -> Sequence[bytes]:
        self.made.append("images")
        return [b"a picture"]

    def turns(self) -> Sequence[str]:
        self.made.append("turns")
        return ["4", "42"]

    def most_turns_bytes(self) -> int:
        return 99


async def test_servers_get_what_they_want_and_no_more(scripted: Any, make_item: Any) -> None:
    plain, lean, rich = await scripted(), await scripted(), await scripted()
    lean.info = {"wants_ids": False}
    rich.info = {
        "wants_ids": True,
        "wants_messages": True,
        "wants_offsets": True,
        "wants_turns": True,
        "wants_images": True,
    }
    routes = {"lean": [lean.address], "rich": [rich.address]}
    client = RewardClient([plain.address], routes)
    picture = [{"uri": "images/1", "sha256": bytes(32)}]
    items = [make_item(name, data_source=name, images=picture) for name in ("plain", "lean", "rich")]
    details = [Details() for _ in items]
    results = await asyncio.wait_for(client.score(items, timeout_s=60, details=details), 120)
    assert [result.scored.total for result in results] == [1.0] * 3
    sent = [server.requests[0].items[0] for server in (plain, lean, rich)]
    assert [list(item.response_ids) for item in sent] == [[52, 50], [], [52, 50]]
    assert [bool(item.messages_json) for item in sent] == [False, False, True]
    assert [list(item.token_ends) for item in sent] == [[], [], [1, 2]]
    assert [list(item.turns) for item in sent] == [[], [], ["4", "42"]]
    assert [(item.images[0].uri, item.images[0].content) for item in sent] == [
        *[("images/1", b"")] * 2,
        ("images/1", b"a picture"),
    ]
    assert [own.made for own in details[:2]] == [[], []]
    assert all(len(item.response_ids) == 2 for item in items), "the caller's item is as it was"
    await client.close()


def test_an_item_that_is_sent_as_it_is_is_not_copied(make_item: Any) -> None:
    item = make_item()
    assert outgoing(item, None, Wants()) is item
    assert outgoing(item, Details(), Wants()) is item
    assert outgoing(item, None, Wants(ids=False)) is not item
    bare = make_item(response_ids=[])
    assert outgoing(bare, None, Wants(ids=False, messages=True)) is bare


async def test_functions_here_get_what_they_want_too(make_item: Any) -> None:
    def score(items: Sequence[RewardItem]) -> list[float]:
        wanted = [(item.messages, item.token_ends, item.turns, item.image_contents) for item in items]
        return [float(all(parts) and not item.response_ids) for parts, item in zip(wanted, items, strict=True)]

    score.wants = ("messages", "offsets", "turns", "images")  # type: ignore[attr-defined]
    scorer = LocalScorer(ScoringEngine([score]))
    (result,) = await scorer.score([make_item(images=[{"uri": "images/1"}])], details=[Details()])
    assert result.scored.total == 1.0
    await scorer.close()


async def test_a_server_is_asked_again_no_sooner_than_it_says(scripted: Any, make_item: Any) -> None:
    asked: list[float] = []

    async def busy_once(request: reward_pb2.ScoreRequest, _context: Any) -> reward_pb2.ScoreResponse:
        asked.append(time.monotonic())
        response = reward_pb2.ScoreResponse()
        for item in request.items:
            if len(asked) == 1:
                error = reward_pb2.Error(code="busy", message="later", retryable=True, retry_after_ms=1500)
                response.results.add(item_id=item.item_id, error=error)
            else:
                response.results.add(item_id=item.item_id).scored.total = 1.0
        return response

    client = RewardClient([(await scripted(busy_once)).address])
    (result,) = await asyncio.wait_for(client.score([make_item()], timeout_s=60), 120)
    assert result.scored.total == 1.0
    assert asked[1] - asked[0] >= 1.4
    # An item's own time is not prolonged by it.
    asked.clear()
    (result,) = await asyncio.wait_for(client.score([make_item()], timeout_s=0.5), 120)
    assert result.error.code == "busy"
    await client.close()


async def test_requests_are_no_larger_than_a_server_takes(scripted: Any, make_item: Any) -> None:
    server = await scripted()
    server.info = {"max_bytes": 4000}
    client = RewardClient([server.address])
    items = [make_item(f"{n}", "x" * 1000, response_ids=[]) for n in range(8)]
    items.append(make_item("large", "x" * 5000, response_ids=[]))
    results = await asyncio.wait_for(client.score(items, timeout_s=60), 120)
    assert [result.HasField("scored") for result in results] == [True] * 8 + [False]
    assert results[-1].error.code == "too_large"
    assert not results[-1].error.retryable
    assert all(request.ByteSize() <= 4000 for request in server.requests)
    await client.close()


async def test_no_more_calls_at_a_time_than_a_server_takes(scripted: Any, make_item: Any) -> None:
    running, most = 0, 0
    go = asyncio.Event()

    async def counting(request: reward_pb2.ScoreRequest, _context: Any) -> reward_pb2.ScoreResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go.wait()
        running -= 1
        return reward_pb2.ScoreResponse(
            results=[reward_pb2.ScoreResult(item_id=item.item_id, scored={"total": 1.0}) for item in request.items]
        )

    server = await scripted(counting, max_items=1)
    server.info = {"max_concurrency": 1}
    client = RewardClient([server.address])
    scoring = asyncio.create_task(client.score([make_item(f"{n}", group_id=f"g{n}") for n in range(4)], timeout_s=60))
    await asyncio.wait_for(server.called.wait(), 120)
    # Other calls would have come as far as these.
    async with grpc.aio.insecure_channel(server.address.removeprefix("grpc://")) as channel:
        for _ in range(10):
            await reward_pb2_grpc.RewardStub(channel).Info(reward_pb2.InfoRequest())
    go.set()
    assert all(result.HasField("scored") for result in await asyncio.wait_for(scoring, 120))
    assert most == 1
    await client.close()


async def test_a_server_that_needs_groups_gets_them_whole_each_time(scripted: Any, make_item: Any) -> None:
    async def first_member_fails_once(request: reward_pb2.ScoreRequest, _context: Any) -> reward_pb2.ScoreResponse:
        response = reward_pb2.ScoreResponse()
        for item in request.items:
            if item.item_id == "a0" and len(server.requests) == 1:
                response.results.add(item_id="a0", error=reward_pb2.Error(code="busy", retryable=True))
            else:
                response.results.add(item_id=item.item_id).scored.total = float(len(request.items))
        return response

    server = await scripted(first_member_fails_once, max_items=4)
    server.info = {"needs_group": True}
    client = RewardClient([server.address], limits=CallLimits(attempts=2))
    groups = {"a": 3, "b": 3, "c": 5}
    items = [make_item(f"{group}{n}", group_id=group) for group, size in groups.items() for n in range(size)]
    results = {r.item_id: r for r in await asyncio.wait_for(client.score(items, timeout_s=60), 120)}
    requests = [sorted(item.item_id for item in request.items) for request in server.requests]
    assert requests == [["a0", "a1", "a2"], ["b0", "b1", "b2"], ["a0", "a1", "a2"]]
    assert [results[f"a{n}"].scored.total for n in range(3)] == [3.0] * 3
    assert {results[f"c{n}"].error.code for n in range(5)} == {"too_large"}
    assert "a group of 5 items" in results["c0"].error.message
    await client.close()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"spans": [{"begin": 1, "end": 3}]}, "bad_span"),
        ({"spans": [{"begin": 1, "end": 1}]}, "bad_span"),
        ({"spans": [{"begin": 0, "end": 0}]}, "bad_span"),
        ({"spans": [{"turn": 3}]}, "bad_span"),
        ({"spans": [{"begin": 1, "end": 1, "turn": 1}]}, "bad_span"),
        ({"spans": [{"begin": 0, "end": 9, "turn": 2}]}, "bad_span"),
        ({"spans": [{"begin": 0, "end": 2, "value": float("nan")}]}, "nan"),
        ({"cost": float("inf")}, "nan"),
        ({"total": 1e39}, "nan"),
        ({"components": {"part": -1e39}}, "nan"),
        ({"components": {str(n): 1.0 for n in range(257)}}, "components"),
        ({"components": {"n" * 201: 1.0}}, "components"),
    ],
)
async def test_spans_and_costs_that_make_no_sense(
    scripted: Any, make_item: Any, fields: dict[str, Any], code: str
) -> None:
    async def wrong(request: reward_pb2.ScoreRequest, _context: Any) -> reward_pb2.ScoreResponse:
        return reward_pb2.ScoreResponse(results=[{"item_id": "a", "scored": {"total": 1.0, **fields}}])

    client = RewardClient([(await scripted(wrong)).address])
    (result,) = await asyncio.wait_for(
        client.score([make_item("a", turn_count=2, turns=["4", "42"])], timeout_s=60), 120
    )
    assert (result.error.code, result.error.retryable) == (code, False)
    await client.close()


def test_spans_of_turns_that_make_sense(make_item: Any) -> None:
    spans = [{"turn": 1, "value": 1.0, "of_total": True}, {"begin": 1, "end": 2, "turn": 2}, {"begin": 0, "end": 2}]
    result = reward_pb2.ScoreResult(item_id="a", scored={"total": 1.0, "spans": spans})
    assert contract_fault(make_item("a", turn_count=2, turns=["4", "42"]), result) is None
    assert contract_fault(make_item("a", turn_count=2), result) is None, "its server was not sent the texts"
    assert contract_fault(make_item("a"), result) is None, "their number is not known"
