"""A process with many simulated generators, which its parent directs over a pipe.

It joins its generators and answers with the seconds that took. Then it takes commands, each with one answer:

* `begin`: they work from now on.
* `speed`: tokens/s of a response.
* `seeded`: there are prompts from now on.
* `measured`: measurements since the last time.
* `join`: further generators, while the others work.
* `end`: all end.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from benchmarks.fleet.pipes import receive
from benchmarks.fleet.scenario import Scenario
from benchmarks.fleet.scripted_source import TokenBank
from benchmarks.fleet.simulated_generator import Measurements, SimulatedGenerator
from rollmesh.mesh.config.network import SecuritySection
from rollmesh.mesh.runtime.memory_tuning import freeze_heap, keep_freed_memory
from rollmesh.mesh.runtime.open_files import connections_here

# Generators of one process that join at the same time.
_JOINING = 32


class _Fleet:
    """The generators of this process."""

    def __init__(self, scenario: Scenario, mesh: str, security: SecuritySection) -> None:
        self._scenario, self._mesh, self._security = scenario, mesh, security
        self._bank = TokenBank(scenario.lengths.most)
        self._measured = Measurements()
        self._generators: list[SimulatedGenerator] = []
        self._work: list[asyncio.Task[None]] = []
        self._speed = scenario.speed

    async def join(self, numbers: Iterable[int]) -> float:
        """Joins generators, some at a time; returns the seconds that took."""
        began, room = time.perf_counter(), asyncio.Semaphore(_JOINING)

        async def join_one(number: int) -> SimulatedGenerator:
            async with room:
                generator = SimulatedGenerator(
                    self._scenario, number, self._mesh, self._security, self._bank, self._measured
                )
                await generator.join()
                return generator

        self._generators += await asyncio.gather(*map(join_one, numbers))
        return time.perf_counter() - began

    def begin(self) -> None:
        """Sets all to work that do not work yet."""
        for generator in self._generators[len(self._work) :]:
            generator.set_speed(self._speed)
            self._work.append(asyncio.create_task(generator.run()))

    async def answer(self, verb: str, value: Any) -> Any:
        """Carries out one command."""
        if verb == "join":
            seconds = await self.join(value)
            self.begin()
            return seconds
        if verb == "begin":
            self.begin()
        elif verb == "speed":
            self._speed = value
            for generator in self._generators:
                generator.set_speed(value)
        elif verb == "seeded":
            self._measured.seeded_at = time.perf_counter()
        elif verb == "measured":
            return self._measured.pop()
        return None

    def check(self) -> None:
        """Raises the error of a generator that has failed."""
        for task in self._work:
            if task.done():
                task.result()

    async def close(self) -> None:
        """Ends all of them."""
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        await asyncio.gather(*(generator.close() for generator in self._generators))


def run(conn: Connection, scenario: Scenario, mesh: str, security: SecuritySection, numbers: range) -> None:
    """The process."""
    logging.basicConfig(level=logging.ERROR)
    keep_freed_memory()
    connections_here()

    async def main() -> None:
        fleet = _Fleet(scenario, mesh, security)
        conn.send(await fleet.join(numbers))
        freeze_heap()
        while True:
            verb, value = await receive(conn)
            fleet.check()
            if verb == "end":
                await fleet.close()
                conn.send(None)
                return
            conn.send(await fleet.answer(verb, value))

    uvloop.run(main())
