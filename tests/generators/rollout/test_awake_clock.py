"""Time that is slept does not count."""

from __future__ import annotations

import asyncio

import pytest

from rollmesh.generators.rollout.awake_clock import AwakeClock


async def test_it_stands_still_while_stopped() -> None:
    clock = AwakeClock(asleep=True)
    at = clock.time()
    await asyncio.sleep(0.05)
    assert clock.time() == at
    assert clock.slept_s >= 0.05
    clock.go()
    clock.go()
    await asyncio.sleep(0.02)
    assert clock.time() > at
    clock.stop()
    clock.stop()
    at, slept_s = clock.time(), clock.slept_s
    await asyncio.sleep(0.02)
    assert clock.time() == at
    assert clock.slept_s > slept_s


async def test_a_timeout_waits_until_the_time_was_spent_awake() -> None:
    clock = AwakeClock()
    spent = []

    async def wait() -> None:
        try:
            async with clock.timeout(0.05):
                await asyncio.Event().wait()
        finally:
            spent.append(clock.time() - begin)

    begin = clock.time()
    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    clock.stop()
    await asyncio.sleep(0.2)
    assert not waiting.done()
    clock.go()
    with pytest.raises(TimeoutError):
        await waiting
    assert spent[0] >= 0.05
    async with clock.timeout(60.0):
        await asyncio.sleep(0)
