"""The cache against a model: whatever leads, follows, fails, is given up or leaves, each gets its own answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.mesh.config.scorers.cache import CacheSection
from rollmesh.reward_service.cache.cache import OnOutcome, ScoreCache
from rollmesh.reward_service.call_times import CallTimes
from rollmesh.reward_service.outcomes import NOT_BEGUN, Failed, Outcome, Scored, not_begun

BROKEN = Failed("exception", "a bug")


@dataclass
class Caller:
    """One call of several items, whose computations end as told."""

    cache: ScoreCache
    contents: Sequence[int]
    begin_s: float = 60.0
    got: dict[int, Outcome] = field(default_factory=dict)
    computing: dict[int, asyncio.Future[Outcome]] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        now = time.monotonic()
        keys = {index: bytes([content]) for index, content in enumerate(self.contents)}
        await self.cache.answer(keys, self.compute, CallTimes(now + self.begin_s, now + self.begin_s + 60), self.take)

    async def compute(self, indices: Sequence[int], on_outcome: OnOutcome) -> None:
        for index in indices:
            assert index not in self.computing, "computed twice for one caller"
            self.computing[index] = asyncio.get_running_loop().create_future()
        waiting = {self.computing[index]: index for index in indices}
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                on_outcome(waiting.pop(future), future.result())

    def take(self, index: int, outcome: Outcome) -> None:
        assert index not in self.got
        self.got[index] = outcome

    def end(self, index: int, outcome: Outcome) -> None:
        self.computing[index].set_result(outcome)

    @property
    def open(self) -> list[int]:
        return [index for index, future in self.computing.items() if not future.done()]


async def settled() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


def scored(content: int, *, cached: bool = False) -> Scored:
    return Scored(float(content), {"content": float(content)}, [], [], cached=cached)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.lists(st.integers(0, 3), min_size=1, max_size=4)),
        st.tuples(st.just("end"), st.tuples(st.integers(0, 9), st.sampled_from(["scored", "failed", "not begun"]))),
        st.tuples(st.just("give up"), st.integers(0, 9)),
        st.tuples(st.just("evict"), st.integers(0, 3)),
    ),
    max_size=24,
)


@settings(max_examples=60)
@given(STEPS)
def test_each_caller_gets_an_answer_for_its_own_content(steps: list[tuple[str, object]]) -> None:
    asyncio.run(_played(steps))


async def _played(steps: list[tuple[str, object]]) -> None:
    cache = ScoreCache(CacheSection())
    callers: list[Caller] = []
    told: set[tuple[int, int]] = set()

    def outcome_of(kind: str, caller: Caller, index: int) -> Outcome:
        if kind == "scored":
            return scored(caller.contents[index])
        told.add((callers.index(caller), index))
        return BROKEN if kind == "failed" else not_begun("busy")

    def finish(caller: Caller, kind: str) -> None:
        index = caller.open[0]
        caller.end(index, outcome_of(kind, caller, index))

    for step, detail in steps:
        computing = [caller for caller in callers if caller.open and not caller.task.done()]  # type: ignore[union-attr]
        if step == "call":
            caller = Caller(cache, detail)  # type: ignore[arg-type]
            caller.task = asyncio.create_task(caller.run())
            callers.append(caller)
        elif step == "end" and computing:
            number, kind = detail  # type: ignore[misc]
            finish(computing[number % len(computing)], kind)
        elif step == "give up" and callers:
            callers[detail % len(callers)].task.cancel()  # type: ignore[operator, union-attr]
        elif step == "evict":
            cache.memory.remove(bytes([detail]))  # type: ignore[list-item]
        await settled()
        _check_one_at_a_time(callers, told)
    for _ in range(200):
        await settled()
        for caller in callers:
            if caller.open and not caller.task.done():  # type: ignore[union-attr]
                finish(caller, "scored")
    await asyncio.wait_for(asyncio.gather(*(c.task for c in callers if c.task), return_exceptions=True), 30)
    for number, caller in enumerate(callers):
        assert caller.task is not None
        assert caller.task.cancelled() or len(caller.got) == len(caller.contents)
        for index, outcome in caller.got.items():
            if isinstance(outcome, Failed):
                assert (number, index) in told, "an error that another item has had"
            else:
                content = caller.contents[index]
                assert outcome in (scored(content), scored(content, cached=True))
    assert not cache._flights


def _check_one_at_a_time(callers: list[Caller], told: set[tuple[int, int]]) -> None:
    """An item that has failed for no one is computed by one caller at a time."""
    failed = {callers[number].contents[index] for number, index in told}
    computed = [
        caller.contents[index]
        for caller in callers
        if caller.task is not None and not caller.task.done()
        for index in caller.open
    ]
    for content in set(computed) - failed:
        assert computed.count(content) == 1


async def test_equal_items_are_computed_once_and_only_the_first_is_new() -> None:
    cache = ScoreCache(CacheSection())
    one, other = Caller(cache, [1, 1, 2]), Caller(cache, [2, 1])
    tasks = [asyncio.create_task(caller.run()) for caller in (one, other)]
    await settled()
    assert (sorted(one.computing), sorted(other.computing)) == ([0, 2], [])
    one.end(0, scored(1))
    await settled()
    assert one.got == {0: scored(1), 1: scored(1, cached=True)}
    assert other.got == {1: scored(1, cached=True)}
    one.end(2, scored(2))
    await asyncio.gather(*tasks)
    late = Caller(cache, [2])
    await late.run()
    assert late.got == {0: scored(2, cached=True)}
    stats = cache.stats
    assert (stats.memory, stats.redis, stats.joined, stats.missed) == (1, 0, 3, 2)


async def test_who_waited_for_an_item_that_failed_has_its_own_computed_at_once() -> None:
    cache = ScoreCache(CacheSection())
    callers = [Caller(cache, [1]) for _ in range(3)]
    tasks = [asyncio.create_task(caller.run()) for caller in callers]
    await settled()
    callers[0].end(0, BROKEN)
    await settled()
    assert callers[0].got == {0: BROKEN}
    assert all(caller.open == [0] for caller in callers[1:])
    callers[1].end(0, scored(1))
    callers[2].end(0, BROKEN)
    await asyncio.gather(*tasks)
    assert (callers[1].got, callers[2].got) == ({0: scored(1)}, {0: BROKEN})


async def test_who_waited_too_long_is_not_begun_and_nothing_is_lost() -> None:
    cache = ScoreCache(CacheSection())
    leader, follower = Caller(cache, [1]), Caller(cache, [1], begin_s=0.0)
    tasks = [asyncio.create_task(caller.run()) for caller in (leader, follower)]
    await settled()
    leader.end(0, BROKEN)
    await asyncio.gather(*tasks)
    outcome = follower.got[0]
    assert isinstance(outcome, Failed)
    assert outcome.code == NOT_BEGUN


async def test_scores_are_shared_by_redis_and_bad_bytes_there_are_a_miss(
    redis_section: CacheSection,
) -> None:
    one, other, third = (ScoreCache(redis_section) for _ in range(3))
    first = Caller(one, [7])
    task = asyncio.create_task(first.run())
    async with asyncio.timeout(50):
        while not first.open:
            await asyncio.sleep(0.01)
    first.end(0, scored(7))
    await task
    assert one.redis is not None
    await one.redis.flush()
    second = Caller(other, [7, 7])
    await second.run()
    assert second.got == {0: scored(7, cached=True), 1: scored(7, cached=True)}
    assert (other.stats.redis, other.stats.joined, other.stats.missed) == (1, 1, 0)

    one.redis.put(bytes([7]), b"poison")
    await one.redis.flush()
    again = Caller(third, [7])
    task = asyncio.create_task(again.run())
    async with asyncio.timeout(50):
        while not again.open:
            await asyncio.sleep(0.01)
    again.end(0, scored(7))
    await task
    assert again.got == {0: scored(7)}
    for cache in (one, other, third):
        await cache.close()


@pytest.mark.parametrize("size", [0, 10])
async def test_without_room_everything_is_computed(size: int) -> None:
    cache = ScoreCache(CacheSection(max_bytes=size))
    for _ in range(2):
        caller = Caller(cache, [1])
        task = asyncio.create_task(caller.run())
        await settled()
        caller.end(0, scored(1))
        await task
        assert caller.got == {0: scored(1)}
