"""A process that was away comes back, or is replaced, and the run trains on: learner, generator, front."""

from __future__ import annotations

import pytest

from tests.faults.away.cases import all_rules, pairs, rounds_of_cover, rounds_of_product, thirds_of_cover
from tests.faults.away.world import World

ROUNDS = list(rounds_of_cover())
FIRST, *_ = thirds_of_cover()


def test_the_cover_holds_every_pair() -> None:
    cover = pairs([case for cases in ROUNDS for case in cases])
    assert pairs([case for cases in rounds_of_product(all_rules()) for case in cases]) == cover


def test_the_first_third_meets_every_fault_and_length() -> None:
    cases = [case for cases in ROUNDS for case in cases if case.rules in FIRST]
    met = {value for case in cases for value in enumerate(case.values)}
    assert met == {value for cases in ROUNDS for case in cases for value in enumerate(case.values)}


@pytest.mark.slow
# The start of all processes counts for the first test.
@pytest.mark.asyncio(loop_scope="package")
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            number,
            id=f"{number}-{cases[0].fault}",
            marks=() if all(case.rules in FIRST for case in cases) else pytest.mark.exhaustive,
        )
        for number, cases in enumerate(ROUNDS)
    ],
)
async def test_the_run_trains_on(world: World, number: int) -> None:
    await world.have([case.rules for case in ROUNDS[number]])
    outcomes = await world.put(ROUNDS[number])
    stalls = [f"{outcome.case}: {outcome.stall}" for outcome in outcomes if outcome.stall]
    assert not stalls, "\n\n".join(stalls)
    await world.audit()
