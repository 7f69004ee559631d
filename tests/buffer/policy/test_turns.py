"""Work for generators takes turns: in order, a bounded amount at once, and less while the learner is being served."""

from __future__ import annotations

import asyncio
from collections import deque

from rollmesh.buffer.policy.turns import GeneratorTurns


class Redis:
    """Answers one command after the other, as one server does, when told to."""

    def __init__(self) -> None:
        self.queue: deque[asyncio.Future[None]] = deque()

    async def run(self) -> None:
        self.queue.append(asyncio.get_running_loop().create_future())
        await self.queue[-1]

    async def answer(self) -> None:
        """Answers the oldest command; its caller acts on that before this returns."""
        self.queue.popleft().set_result(None)
        await settled()


async def settled() -> None:
    """Lets all tasks run until they wait for something."""
    for _ in range(10):
        await asyncio.sleep(0)


async def write(turns: GeneratorTurns, redis: Redis, done: list[int], number: int) -> None:
    async with turns.turn():
        await redis.run()
        done.append(number)


async def test_the_learner_waits_for_little_however_much_the_generators_ask_for() -> None:
    turns, redis, done = GeneratorTurns(at_once=32, with_learner=8), Redis(), list[int]()
    writes = [asyncio.create_task(write(turns, redis, done, number)) for number in range(1000)]
    await settled()
    assert len(redis.queue) == 32

    async def learner_call(steps: int) -> None:
        with turns.serving_learner():
            for _ in range(steps):
                await redis.run()

    call = asyncio.create_task(learner_call(5))
    await settled()
    while not call.done():
        await redis.answer()
    # All that had begun before the first step; then eight before each of the others.
    assert len(done) <= 32 + 4 * 8
    assert len(redis.queue) == 32, "all at once again"
    while not all(task.done() for task in writes):
        await redis.answer()
    assert done == list(range(1000)), "in order"


async def test_generators_are_served_while_the_learner_always_calls() -> None:
    turns, redis, done = GeneratorTurns(at_once=4, with_learner=1), Redis(), list[int]()
    with turns.serving_learner():
        writes = [asyncio.create_task(write(turns, redis, done, number)) for number in range(20)]
        await settled()
        while not all(task.done() for task in writes):
            assert len(redis.queue) == 1
            await redis.answer()
    assert done == list(range(20))


async def test_a_cancelled_waiter_leaves_its_turn_to_the_next() -> None:
    turns, redis, done = GeneratorTurns(at_once=1), Redis(), list[int]()
    first, second, third, fourth = (asyncio.create_task(write(turns, redis, done, number)) for number in range(4))
    await settled()
    second.cancel()
    redis.queue.popleft().set_result(None)
    while not first.done():
        await asyncio.sleep(0)
    # Its turn has come, and it has not begun yet.
    third.cancel()
    await settled()
    await redis.answer()
    await asyncio.gather(first, second, third, fourth, return_exceptions=True)
    assert done == [0, 3]
    async with turns.turn():
        assert not redis.queue
