"""Redis comes back without its last writes, as after a power cut under `everysec`, or with an older snapshot.

Whatever was lost, nothing stays with a process that has forgotten it: every run trains on, and nothing is trained
twice.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.faults.away.cases import thirds_of_cover
from tests.faults.away.run import BOUND_S, MANY, Run
from tests.faults.away.world import World
from tests.faults.proxy import Conditions

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.slow]
RULES = thirds_of_cover()[0][:3]
# Batches after a loss: what was lost comes up again in the first ones.
BATCHES = 2


class Tail:
    """The end of the append-only file, which is synced before every acknowledgement here."""

    def __init__(self, world: World) -> None:
        self._redis, self._folder = world.redis, world.redis_folder
        self._mark = self.bytes()

    def _file(self) -> Path:
        return max([*self._folder.glob("appendonlydir/*.incr.aof"), *self._folder.glob("appendonly.aof")])

    def bytes(self) -> int:
        return self._file().stat().st_size

    async def lose(self, mark: int | None = None) -> None:
        """Redis dies, and comes back as it was when this began, or at `mark`."""
        os.kill(self._redis.pid, signal.SIGKILL)
        await self._redis.wait_until_dead(60.0)
        os.truncate(self._file(), self._mark if mark is None else mark)
        await self._redis.start()


def runs(world: World) -> list[Run]:
    """One under every bound; the others stay at rest."""
    return [run for run in world.runs if run.rules in RULES]


async def each(world: World, act: Callable[[Run], Awaitable[object]]) -> None:
    await asyncio.gather(*(act(run) for run in runs(world)))


async def trains_on(run: Run) -> None:
    run.trained_so_far()
    run.allow(MANY)
    for _ in range(BATCHES):
        await run.until_trained()
    # It waits for the others at rest.
    run.allow(0)


async def all_train_on(world: World) -> None:
    await each(world, trains_on)
    await world.audit()


async def part_of_a_batch(run: Run) -> None:
    await run.hold(1, BOUND_S)


async def finish_one(run: Run) -> None:
    run.allow(1)
    await run.hosts["generator"].until(run.name, "finished")


@asynccontextmanager
async def cut_off(world: World, who: str) -> AsyncIterator[None]:
    """The learner, or the generator, of every run away from its fronts."""
    try:
        await each(world, lambda run: run.link(who, Conditions("cut")))
        yield
    finally:
        await each(world, lambda run: run.link(who, Conditions()))


async def test_members_that_were_written(world: World) -> None:
    """The generator has finished the group, and forgotten it."""
    await each(world, part_of_a_batch)
    tail = Tail(world)
    await each(world, finish_one)
    await tail.lose()
    await all_train_on(world)


async def test_grants(world: World) -> None:
    """A generator holds groups under leases that Redis has given to no one."""
    await each(world, part_of_a_batch)
    async with cut_off(world, "generator"):
        await each(world, lambda run: run.until(lambda known: known.unheld == known.counts.generating > 0))
        tail = Tail(world)
    await each(world, lambda run: run.until(lambda known: known.unheld < known.counts.generating))
    await tail.lose()
    await all_train_on(world)


async def test_leases(world: World) -> None:
    """The learner holds groups that are ready for any learner."""
    await each(world, part_of_a_batch)
    async with cut_off(world, "learner"):
        await each(world, finish_one)
        await each(world, lambda run: run.until(lambda known: known.counts.leased == 0))
        tail = Tail(world)
    # A group that completes a batch is trained, and leased no more.
    await each(world, lambda run: run.until(lambda known: known.counts.leased > 0 or not known.counts.ready))
    await tail.lose()
    await all_train_on(world)


async def test_claims_and_seeds(world: World) -> None:
    """Batches were trained that Redis knows nothing of, and prompts are gone that came in their place."""
    await each(world, part_of_a_batch)
    tail = Tail(world)
    before = [await run.client.describe("train") for run in runs(world)]
    await each(world, trains_on)
    await each(world, part_of_a_batch)
    for run, known in zip(runs(world), before, strict=True):
        assert (await run.client.describe("train")).seeded > known.seeded
    await tail.lose()
    await all_train_on(world)


async def test_any_bytes_again_and_again(world: World) -> None:
    """While every process works, from the middle of whatever is written."""
    rng = random.Random(1)
    for _ in range(2):
        for run in runs(world):
            run.allow(MANY)
        tail = Tail(world)
        await each(world, lambda run: run.until_trained())
        await tail.lose(tail.bytes() - rng.randrange(8_000))
        await each(world, trains_on)
    await world.audit()


async def test_everything(world: World) -> None:
    """An empty Redis, under every process."""
    await each(world, part_of_a_batch)
    await Tail(world).lose(0)
    await all_train_on(world)
