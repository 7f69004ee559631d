"""Calls of functions for items: for whom, and in what order. The functions answer as told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from rollmesh.reward_service.call_times import CallTimes
from rollmesh.reward_service.composition.part import Part
from rollmesh.reward_service.composition.plan import Composition
from rollmesh.reward_service.composition.running import OnOutcome, run_parts
from rollmesh.reward_service.outcomes import Failed, Outcome, Scored, not_begun

LATER = Failed("exception", "503", retryable=True)


class Functions:
    """Answers each call of a part with the next of its outcomes, or as a function of the item."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self.times: dict[str, CallTimes] = {}

    async def run(
        self, parts: list[Part | str], groups: Sequence[Sequence[int]], *, timeout_s: float = 60.0, attempts: int = 3
    ) -> dict[int, Outcome]:
        composition = Composition(parts)
        got: dict[int, Outcome] = {}

        async def apply(place: int, indices: Sequence[int], times: CallTimes, on_outcome: OnOutcome) -> None:
            name = composition.names[place]
            self.calls.append((name, tuple(indices)))
            self.times[name] = times
            for index in indices:
                await asyncio.sleep(0)
                answer = self.answers[name]
                on_outcome(index, answer.pop(0) if isinstance(answer, list) else answer(index))

        def once(index: int, outcome: Outcome) -> None:
            assert index not in got
            got[index] = outcome

        times = CallTimes.within(timeout_s, composition.stages)
        async with asyncio.timeout(50):
            await run_parts(composition, groups, apply, times, attempts=attempts, on_outcome=once)
        return got


def totals(outcomes: dict[int, Outcome]) -> dict[int, float]:
    return {index: each.total for index, each in outcomes.items() if isinstance(each, Scored)}


async def test_a_function_is_called_where_its_gate_is_open_for_a_group_together() -> None:
    functions = Functions(
        a=lambda index: Scored(index % 2), b=lambda index: Scored(10.0), c=lambda index: Scored(100.0)
    )
    parts: list[Part | str] = ["a", Part("b", gate="a"), Part("c", gate="b above 10")]
    got = await functions.run(parts, [[0, 1, 3], [2, 4], [5]])
    assert totals(got) == {0: 0.0, 2: 0.0, 4: 0.0, 1: 11.0, 3: 11.0, 5: 11.0}
    assert functions.calls == [("a", (0, 1, 3, 2, 4, 5)), ("b", (1, 3)), ("b", (5,))]


async def test_an_item_has_its_outcome_while_others_are_under_way() -> None:
    seen: list[int] = []
    first = asyncio.Event()

    async def apply(place: int, indices: Sequence[int], times: CallTimes, on_outcome: OnOutcome) -> None:
        on_outcome(indices[0], Scored(0.0))
        if place == 0:
            await first.wait()
            on_outcome(indices[1], Scored(1.0))

    def take(index: int, outcome: Outcome) -> None:
        seen.append(index)
        first.set()

    composition = Composition(["a", Part("b", gate="a")])
    async with asyncio.timeout(50):
        await run_parts(composition, [[7], [8]], apply, CallTimes.within(60, 1), attempts=1, on_outcome=take)
    assert seen == [7, 8]


async def test_stages_have_a_time_each() -> None:
    functions = Functions(a=lambda index: Scored(1.0), b=lambda index: Scored(1.0))
    began = time.monotonic()
    await functions.run(["a", Part("b", gate="a")], [[0]], timeout_s=100.0)
    first, second = functions.times["a"], functions.times["b"]
    assert first.deadline == second.begin_by
    assert second.deadline - second.begin_by >= 1.0
    assert first.deadline - first.begin_by >= 1.0
    assert second.deadline - began == pytest.approx(100.0, abs=30)


async def test_what_may_pass_is_tried_again_before_the_part_is_left_out() -> None:
    twice = Functions(a=lambda index: Scored(1.0), b=[LATER, LATER, Scored(5.0)])
    assert totals(await twice.run(["a", Part("b", on_error="skip")], [[0]])) == {0: 6.0}
    thrice = Functions(a=lambda index: Scored(1.0), b=[LATER] * 3)
    assert totals(await thrice.run(["a", Part("b", on_error="skip")], [[0]])) == {0: 1.0}
    assert thrice.calls.count(("b", (0,))) == 3
    lasting = Functions(a=lambda index: Scored(1.0), b=[Failed("exception", "a bug")])
    assert totals(await lasting.run(["a", Part("b", on_error="value", value=9.0)], [[0]])) == {0: 10.0}
    failing = Functions(a=lambda index: Scored(1.0), b=[LATER])
    assert await failing.run(["a", "b"], [[0]]) == {0: LATER}


async def test_members_that_fail_together_are_tried_together() -> None:
    answers = {0: [LATER, Scored(1.0)], 1: [Scored(2.0)], 2: [LATER, Scored(3.0)], 3: [LATER, Scored(4.0)]}
    functions = Functions(a=lambda index: answers[index].pop(0))
    got = await functions.run([Part("a", on_error="skip")], [[0, 1, 2], [3]])
    assert totals(got) == {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}
    assert functions.calls == [("a", (0, 1, 2, 3)), ("a", (0, 2)), ("a", (3,))]


async def test_an_item_that_was_not_begun_comes_again_and_is_never_left_out() -> None:
    busy = not_begun("busy")
    functions = Functions(a=lambda index: Scored(1.0), b=[busy])
    assert await functions.run(["a", Part("b", on_error="skip")], [[0]]) == {0: busy}


async def test_no_room_for_another_try_lets_the_last_error_count() -> None:
    functions = Functions(a=lambda index: Scored(1.0), b=[LATER, not_begun("busy")])
    assert totals(await functions.run(["a", Part("b", on_error="skip")], [[0]])) == {0: 1.0}


async def test_a_try_that_would_begin_too_late_is_none() -> None:
    later = Failed("exception", "503", retryable=True, retry_after_s=1000.0)
    functions = Functions(a=lambda index: Scored(1.0), b=[later])
    assert totals(await functions.run(["a", Part("b", on_error="skip")], [[0]])) == {0: 1.0}
