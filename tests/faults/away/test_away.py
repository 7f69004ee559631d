"""A process that was away comes back, or is replaced, and the run trains on: learner, generator, front."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.faults.away.cases import all_rules, pairs, rounds_of_cover, rounds_of_product, rules_of_cover
from tests.faults.away.world import World

pytestmark = pytest.mark.slow
ROUNDS = list(rounds_of_cover())


def test_the_cover_holds_every_pair() -> None:
    cover = pairs([case for cases in ROUNDS for case in cases])
    assert pairs([case for cases in rounds_of_product(all_rules()) for case in cases]) == cover


@pytest.fixture(scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    """All runs of the cover."""
    owner = World(tmp_path_factory.mktemp("away"))
    try:
        await owner.start()
        await owner.add(rules_of_cover())
        yield owner
    finally:
        await owner.close()


# The start of all processes counts for the first test.
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("number", range(len(ROUNDS)), ids=lambda number: f"{number}-{ROUNDS[number][0].fault}")
async def test_the_run_trains_on(world: World, number: int) -> None:
    outcomes = await world.put(ROUNDS[number])
    stalls = [f"{outcome.case}: {outcome.stall}" for outcome in outcomes if outcome.stall]
    assert not stalls, "\n\n".join(stalls)
    await world.audit()
