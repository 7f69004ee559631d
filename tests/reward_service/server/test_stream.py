"""ScoreStream of the service: results as they come, cancellation, bounds, and ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import pytest

from rollmesh.protos import reward_pb2, reward_pb2_grpc
from rollmesh.reward_service.outcomes import RewardItem
from rollmesh.reward_service.scoring.engine import ScoringEngine
from rollmesh.reward_service.server.server import RewardServer
from rollmesh.reward_service.server.stream import ScoreStream


class Held:
    """A reward that waits for `release` where the response is `slow`; it notes who has begun and who was cancelled."""

    __name__ = "held"
    deterministic = True

    def __init__(self) -> None:
        self.release = threading.Event()
        self.cancelled = threading.Event()
        self.begun = threading.Semaphore(0)

    async def __call__(self, solution_str: str, ground_truth: str) -> float:
        if solution_str == "slow":
            self.begun.release()
            try:
                while not self.release.is_set():
                    await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        return 1.0


class Service:
    """A running service and a caller's stream to it."""

    def __init__(self, functions: Sequence[Any], **options: Any) -> None:
        self.server = RewardServer(ScoringEngine(functions, **options), timeout_s=60.0)
        self.channel: grpc.aio.Channel

    async def __aenter__(self) -> Service:
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{await self.server.start()}")
        self.stub = reward_pb2_grpc.RewardStub(self.channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.server.stop(0)

    def stream(self) -> Any:
        return self.stub.ScoreStream(timeout=180)

    def open_items(self) -> float:
        value = self.server.metrics.registry.get_sample_value("rollmesh_reward_items_in_progress")
        assert value is not None
        return value

    async def until_open(self, items: int) -> None:
        async with asyncio.timeout(120):
            while self.open_items() != items:
                await asyncio.sleep(0.005)


@pytest.fixture
async def held() -> AsyncIterator[Held]:
    function = Held()
    yield function
    function.release.set()


def asked(item: reward_pb2.ScoreItem, timeout_ms: int = 0) -> reward_pb2.ScoreStreamRequest:
    return reward_pb2.ScoreStreamRequest(item=item, timeout_ms=timeout_ms)


async def test_a_slow_item_holds_no_other(held: Held, make_item: Any) -> None:
    async with Service([held], call_timeout_s=60.0) as service:
        call = service.stream()
        for name, response in (("a", "slow"), ("b", "42"), ("c", "slow"), ("d", "42")):
            await call.write(asked(make_item(name, response, group_id="one group")))
        await call.done_writing()
        assert {(await call.read()).item_id, (await call.read()).item_id} == {"b", "d"}
        held.release.set()
        assert {(await call.read()).item_id, (await call.read()).item_id} == {"a", "c"}
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
        totals = service.server.metrics.gauges()
        assert (totals["reward_items"], totals["reward_calls"], service.open_items()) == (4.0, 1.0, 0.0)


async def test_a_cancelled_item_ends_at_once_and_its_work_too(held: Held, make_item: Any) -> None:
    async with Service([held], call_timeout_s=60.0) as service:
        call = service.stream()
        await call.write(asked(make_item("a", "slow")))
        assert await asyncio.to_thread(held.begun.acquire, timeout=120)
        await call.write(reward_pb2.ScoreStreamRequest(cancel="unknown"))
        await call.write(reward_pb2.ScoreStreamRequest(cancel="a"))
        result = await call.read()
        assert (result.item_id, result.error.code, result.error.retryable) == ("a", "cancelled", False)
        assert await asyncio.to_thread(held.cancelled.wait, 120)
        # The id may be used again.
        await call.write(asked(make_item("a", "42")))
        assert (await call.read()).scored.total == 1.0
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_nothing_is_left_of_a_caller_that_has_gone(held: Held, make_item: Any) -> None:
    async with Service([held], call_timeout_s=60.0) as service:
        call = service.stream()
        await call.write(asked(make_item("a", "slow")))
        assert await asyncio.to_thread(held.begun.acquire, timeout=120)
        call.cancel()
        assert await asyncio.to_thread(held.cancelled.wait, 120)
        await service.until_open(0)


async def test_an_item_has_its_own_time(held: Held, make_item: Any) -> None:
    async with Service([held], call_timeout_s=60.0) as service:
        call = service.stream()
        await call.write(asked(make_item("short", "slow"), timeout_ms=200))
        result = await call.read()
        # On a machine that is too slow to begin it in its time, it was not begun.
        assert result.item_id == "short"
        assert result.error.code in ("timeout", "not_begun")
        call.cancel()


@pytest.mark.parametrize("bound", ["items", "bytes"])
async def test_a_caller_that_sends_too_much_has_to_wait(
    held: Held, make_item: Any, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    if bound == "items":
        monkeypatch.setattr("rollmesh.reward_service.server.stream.MOST_OPEN", 3)
    else:
        size = make_item("0", "slow", group_id="g0").ByteSize()
        monkeypatch.setattr("rollmesh.reward_service.server.stream._MOST_BYTES", 3 * size - 1)
    async with Service([held], call_timeout_s=60.0) as service:
        call = service.stream()
        for number in range(8):
            await call.write(asked(make_item(f"{number}", "slow", group_id=f"g{number}")))
        await call.done_writing()
        await service.until_open(3)
        for _ in range(3):
            assert await asyncio.to_thread(held.begun.acquire, timeout=120)
        assert not held.begun.acquire(blocking=False)
        held.release.set()
        assert len([result async for result in call]) == 8


@pytest.mark.parametrize("wrong", ["twice", "empty"])
async def test_requests_that_break_the_contract_end_the_call(held: Held, make_item: Any, wrong: str) -> None:
    async with Service([held], call_timeout_s=60.0) as service:
        call = service.stream()
        if wrong == "twice":
            await call.write(asked(make_item("a", "slow")))
            await call.write(asked(make_item("a", "slow")))
        else:
            await call.write(reward_pb2.ScoreStreamRequest(timeout_ms=1))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert ("in progress" if wrong == "twice" else "neither") in (caught.value.details() or "")


async def test_functions_of_groups_see_whole_groups(make_item: Any) -> None:
    seen: list[list[str]] = []

    def share(items: Sequence[RewardItem]) -> list[float]:
        seen.append([item.item_id for item in items])
        return [1.0 / len(items)] * len(items)

    async with Service([share]) as service:
        call = service.stream()
        for name in ("a0", "a1", "a2", "b0", "b1"):
            await call.write(asked(make_item(name, group_id=name[0])))
        await call.done_writing()
        totals = {result.item_id: result.scored.total async for result in call}
        assert totals == {"a0": 1 / 3, "a1": 1 / 3, "a2": 1 / 3, "b0": 0.5, "b1": 0.5}
        assert sorted(seen) == [["a0", "a1", "a2"], ["b0", "b1"]]
        # A group that no one ends is not begun, and says so in its time.
        call = service.stream()
        await call.write(asked(make_item("open"), timeout_ms=100))
        result = await call.read()
        assert (result.error.code, result.error.retryable) == ("not_begun", True)
        assert "group has not ended" in result.error.message
        call.cancel()


def wanting(*wants: str) -> Any:
    def score(items: Sequence[RewardItem]) -> list[float]:
        return [float(bool(item.messages) and bool(item.token_ends) and not item.response_ids) for item in items]

    score.wants = wants  # type: ignore[attr-defined]
    return score


def alone(items: Sequence[RewardItem]) -> list[float]:
    return [1.0] * len(items)


alone.needs_group = False  # type: ignore[attr-defined]


def trl(prompts: list[str], completions: list[str], completion_ids: list[list[int]]) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


async def test_a_group_that_is_gathered_keeps_no_cancelled_items(make_item: Any) -> None:
    engine = ScoringEngine([trl])
    await engine.start()
    asked_again = 300
    stream = ScoreStream(engine, lambda _: 60.0, lambda *_: None, lambda _: None)

    async def requests() -> AsyncIterator[reward_pb2.ScoreStreamRequest]:
        for number in range(asked_again):
            yield asked(make_item(str(number), group_id="g"))
            yield reward_pb2.ScoreStreamRequest(cancel=str(number))
            gathered = stream._gathering
            assert gathered is None
        for name in ("left", "gone"):
            yield asked(make_item(name, group_id="g", response_ids=[1, 2]))
        yield reward_pb2.ScoreStreamRequest(cancel="gone")

    results = [result async for result in stream.results(requests())]
    assert [result.error.code for result in results if result.item_id != "left"] == ["cancelled"] * (asked_again + 1)
    assert [result.scored.total for result in results if result.item_id == "left"] == [2.0]
    await engine.close()


async def async_verl(solution_str: str, ground_truth: str) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("functions", "said"),
    [
        (["auto"], {"deterministic"}),
        (["exact_match", async_verl], set()),
        ([Held()], {"deterministic"}),
        ([trl], {"needs_group", "wants_ids"}),
        (["exact_match", wanting("messages", "offsets")], {"needs_group", "wants_messages", "wants_offsets"}),
        ([alone], {"wants_ids"}),
    ],
)
async def test_info_says_what_the_functions_need(functions: list[Any], said: set[str]) -> None:
    async with Service(functions) as service:
        info = await service.stub.Info(reward_pb2.InfoRequest(), timeout=180)
    assert info.streams
    assert info.max_bytes == 64 << 20
    names = ("deterministic", "needs_group", "wants_ids", "wants_messages", "wants_offsets")
    assert {name for name in names if getattr(info, name)} == said
    assert info.HasField("wants_ids")
