"""Rewards that come later: promised once, delivered from anywhere, kept over restarts, late after their time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollmesh.mesh.config.scorers.late import LateSection
from rollmesh.mesh.errors import PayloadError, RewardError
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.client.client import CallLimits, RewardClient, is_pending
from rollmesh.reward_service.composition.part import Part
from rollmesh.reward_service.late import Arrival, Delivery, deliver, later
from rollmesh.reward_service.late.rewards import LateRewards
from rollmesh.reward_service.late.store import LateStore, LateStoreError
from rollmesh.reward_service.late_delivery import deliver_to, receive
from rollmesh.reward_service.outcomes import Outcome, RewardItem, Scored
from rollmesh.reward_service.scoring.engine import ScoringEngine
from tests.command import Command
from tests.secrets_here import write_secret


class Promises:
    """Promises a reward for each item but `now`, and remembers its calls."""

    __name__ = "promises"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, items: Sequence[RewardItem]) -> list[Outcome]:
        self.asked += [item.item_id for item in items]
        return [
            Scored(0.5) if item.response == "now" else later(f"job-{item.item_id}{'b' * item.attempt}")
            for item in items
        ]


def engine(store: Path | None, *functions: Any, **section: float) -> ScoringEngine:
    return ScoringEngine(functions, late=LateRewards(LateSection(store=store, **section)), call_timeout_s=60.0)


async def score(scoring: ScoringEngine, *items: reward_pb2.ScoreItem) -> list[reward_pb2.ScoreResult]:
    return await scoring.score(items, 120.0)


async def test_a_promise_is_made_once_and_kept_over_a_restart(make_item: Any, tmp_path: Path) -> None:
    store, promises = tmp_path / "late.sqlite", Promises()
    first = engine(store, promises, ask_s=7.0)
    one, two, now = make_item("1"), make_item("2"), make_item("3", "now")
    results = await score(first, one, two, now)
    assert [is_pending(result) for result in results] == [True, True, False]
    assert (results[0].error.message, results[0].error.retry_after_ms) == ("job-1", 7000)
    assert results[2].scored.total == 0.5
    assert is_pending((await score(first, one))[0])
    await first.close()
    assert deliver(store, "job-1", Delivery(2.0, {"clicks": 2.0})) is Arrival.DELIVERED
    again = engine(store, promises)
    found, missing = await score(again, one, two)
    assert (found.scored.total, dict(found.scored.components)) == (2.0, {"promises": 2.0, "clicks": 2.0})
    assert is_pending(missing)
    # Another attempt at the group is another response.
    assert is_pending((await score(again, make_item("1", attempt=2)))[0])
    assert promises.asked == ["1", "2", "3", "1"]
    await again.close()


async def test_deliveries_may_come_first_and_the_first_counts(make_item: Any, tmp_path: Path) -> None:
    store = tmp_path / "late.sqlite"
    assert deliver(store, "job-1", 1.0) is Arrival.EARLY
    assert deliver(store, "job-1", 2.0) is Arrival.BEFORE
    assert deliver(store, "job-2", Delivery(None, reason="the user has left")) is Arrival.EARLY
    with pytest.raises(PayloadError, match="not finite"):
        deliver(store, "job-3", float("nan"))
    for ticket in ("", "t" * 100_000):
        with pytest.raises(PayloadError, match="empty, or longer"):
            deliver(store, ticket, 1.0)
    with pytest.raises(LateStoreError, match="no folder"):
        deliver(tmp_path / "absent" / "late.sqlite", "job-3", 1.0)
    scoring = engine(store, Promises())
    found, left = await score(scoring, make_item("1"), make_item("2"))
    assert found.scored.total == 1.0
    assert left.unscorable.reason.endswith("the user has left")
    await scoring.close()
    assert store.stat().st_mode & 0o077 == 0


async def test_rewards_are_delivered_over_the_network(serve_http: Any, tmp_path: Path) -> None:
    key_file = write_secret(tmp_path / "key", "a-key-of-the-service")
    path = tmp_path / "late.sqlite"
    store = LateStore(path)
    store.add("item", "job")
    url = await serve_http(key_file=key_file, late_store=path)

    async def bring(ticket: str, delivery: Delivery, key: str = key_file.read_text()) -> Arrival:
        return await deliver_to(url, ticket, delivery, key=key.strip(), ca=None)

    brought = Delivery(0.5, {"clicks": 2.0})
    with pytest.raises(RewardError, match="401"):
        await bring("job", brought, "another")
    for wrong, words in ((Delivery(None), "neither"), (Delivery(1.0, {"x": float("inf")}), "components")):
        with pytest.raises(PayloadError, match=words):
            await bring("job", wrong)
    with pytest.raises(PayloadError, match="misspelt"):
        receive(path, b'{"ticket": "job", "total": 1, "misspelt": 2}')
    assert [await bring("job", brought), await bring("job", Delivery(9.0))] == [Arrival.DELIVERED, Arrival.BEFORE]
    assert await bring("jbo", brought) is Arrival.EARLY
    assert store.add("item", "job").delivery == brought
    store.close()
    without = await serve_http()
    with pytest.raises(RewardError, match=r"reward\.late\.store"):
        await deliver_to(without, "job", brought, key="", ca=None)


async def test_a_reward_that_never_comes_is_late(make_item: Any, tmp_path: Path) -> None:
    scoring = engine(tmp_path / "late.sqlite", Promises(), timeout_s=1e-6)
    (result,) = await score(scoring, make_item("1"))
    assert (result.error.code, result.error.retryable) == ("late", False)
    await scoring.close()


async def test_without_a_store_a_promise_is_an_error_that_says_so(make_item: Any) -> None:
    scoring = ScoringEngine([Promises()])
    (result,) = await score(scoring, make_item("1"))
    assert result.error.code == "late_store"
    assert "reward.late.store" in result.error.message
    await scoring.close()


async def test_a_part_that_is_pending_is_neither_skipped_nor_hidden(make_item: Any, tmp_path: Path) -> None:
    scoring = engine(tmp_path / "late.sqlite", Part(Promises(), on_error="skip"), "exact_match")
    (pending,) = await score(scoring, make_item("1"))
    assert is_pending(pending)
    deliver(tmp_path / "late.sqlite", "job-1", 2.0)
    (found,) = await score(scoring, make_item("1"))
    assert found.scored.total == 3.0
    await scoring.close()


async def test_the_client_gives_a_pending_item_back_at_once(make_item: Any, scripted: Any) -> None:
    async def promise(request: reward_pb2.ScoreRequest, _context: Any) -> reward_pb2.ScoreResponse:
        error = reward_pb2.Error(code="pending", message="job", retryable=True, retry_after_ms=500)
        return reward_pb2.ScoreResponse(
            results=[reward_pb2.ScoreResult(item_id=item.item_id, error=error) for item in request.items]
        )

    server = await scripted(promise)
    client = RewardClient([server.address], limits=CallLimits(timeout_s=60.0, attempts=3, wait_s=60.0))
    async with asyncio.timeout(60):
        (result,) = await client.score([make_item("1")])
    assert is_pending(result)
    assert result.error.retry_after_ms == 500
    assert len(server.requests) == 1
    await client.close()


def test_the_command_delivers(rollmesh: Command, tmp_path: Path) -> None:
    store = tmp_path / "late.sqlite"
    mistyped = rollmesh("reward", "deliver", str(store), "a", "-1.5")
    assert mistyped.returncode != 0
    assert f"there is no store {store}" in mistyped.stderr
    assert not store.exists()
    LateStore(store).close()
    done = rollmesh("reward", "deliver", str(store), "a", "-1.5", "--component", "clicks=2")
    assert (done.returncode, done.stdout) == (0, "a: kept, but no response has this ticket yet\n")
    again = rollmesh("reward", "deliver", str(store), "a", "2")
    assert again.returncode == 1
    assert "delivered before" in again.stdout
    opened = LateStore(store)
    assert opened.add("item", "a").delivery == Delivery(-1.5, {"clicks": 2.0})
    opened.close()
