"""The swap of shared devices: every path of the state machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.placement.swap import TO_GENERATING, TO_TRAINING, Phase, SwapMachine, SwapRules
from rollmesh.mesh.errors import SwapError


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def machine(clock: Clock | None = None, *, attempts: int = 3) -> SwapMachine:
    return SwapMachine(SwapRules(step_s=10.0, attempts=attempts, pause_s=2.0), clock or Clock())


def generating(clock: Clock | None = None, *, attempts: int = 3) -> SwapMachine:
    swap = machine(clock, attempts=attempts)
    swap.end_turn()
    walk(swap)
    return swap


def walk(swap: SwapMachine) -> list[Phase]:
    """Takes every step with success; the steps."""
    steps = []
    while swap.in_swap:
        steps.append(swap.phase)
        swap.advance()
    return steps


def test_a_learner_begins_with_the_devices_and_swaps_to_and_fro() -> None:
    swap = machine()
    assert swap.phase is Phase.TRAINING
    swap.end_turn()
    assert walk(swap) == list(TO_GENERATING)
    assert swap.phase is Phase.GENERATING
    swap.begin_turn()
    assert walk(swap) == list(TO_TRAINING)
    assert (swap.phase, swap.turns, swap.taken_back) == (Phase.TRAINING, 2, 0)


def test_turns_begin_and_end_where_they_may_alone() -> None:
    swap = machine()
    with pytest.raises(RuntimeError, match="training, not generating"):
        swap.begin_turn()
    with pytest.raises(RuntimeError, match="has no step that ends"):
        swap.advance()
    with pytest.raises(RuntimeError, match="has no step that fails"):
        swap.fail("why")
    swap.end_turn()
    with pytest.raises(RuntimeError, match="offloading, not training"):
        swap.end_turn()


@pytest.mark.parametrize(
    ("failing", "way_back"),
    [
        (Phase.FREEZING, TO_GENERATING[1:]),
        (Phase.RELEASING, TO_GENERATING[1:]),
        (Phase.ONLOADING, TO_GENERATING),
    ],
)
def test_a_step_towards_training_that_fails_is_taken_back(failing: Phase, way_back: tuple[Phase, ...]) -> None:
    clock = Clock()
    swap = generating(clock)
    swap.begin_turn()
    while swap.phase is not failing:
        swap.advance()
    swap.fail("no memory")
    assert tuple(walk(swap)) == way_back
    assert (swap.phase, swap.turns, swap.taken_back) == (Phase.GENERATING, 1, 1)
    assert swap.pause_s == 2.0
    clock.now += 2.0
    assert swap.pause_s == 0.0


def test_after_several_attempts_that_were_taken_back_the_run_ends_and_says_why() -> None:
    swap = generating()
    for attempt in range(1, 4):
        swap.begin_turn()
        swap.fail(f"generator-0: no answer {attempt}")
        if attempt == 3:
            while swap.phase is not Phase.RESUMING:
                swap.advance()
            with pytest.raises(SwapError, match="3 attempts; the last failed freezing: generator-0: no answer 3"):
                swap.advance()
            assert swap.phase is Phase.GENERATING
        else:
            walk(swap)
            assert swap.pause_s == 2.0 * 2 ** (attempt - 1)


def test_a_turn_that_succeeds_ends_a_row_of_failures() -> None:
    swap = generating()
    for _ in range(4):
        for failures in range(2):
            swap.begin_turn()
            swap.fail(f"failure {failures}")
            walk(swap)
        swap.begin_turn()
        walk(swap)
        swap.end_turn()
        walk(swap)
    assert swap.taken_back == 8


def test_a_learner_that_cannot_give_its_memory_back_keeps_it() -> None:
    swap = machine()
    swap.end_turn()
    with pytest.raises(SwapError, match="could not give its memory back: disk full"):
        swap.fail("disk full")
    assert swap.phase is Phase.TRAINING


@pytest.mark.parametrize("failing", TO_GENERATING[1:])
def test_waking_is_tried_again_from_the_memory_on_and_then_given_up(failing: Phase) -> None:
    swap = machine()
    swap.end_turn()
    for attempt in range(1, 4):
        while swap.phase is not failing:
            swap.advance()
        if attempt == 3:
            with pytest.raises(SwapError, match=f"woken in 3 attempts; the last: {failing}: digests differ"):
                swap.fail("digests differ")
            assert swap.phase is Phase.GENERATING
        else:
            swap.fail("digests differ")
            assert swap.phase is Phase.WAKING


def test_generators_that_wake_end_a_row_of_failures() -> None:
    swap = machine()
    for _ in range(3):
        swap.end_turn()
        swap.advance()
        swap.fail("once")
        swap.fail("twice")
        walk(swap)
        swap.begin_turn()
        walk(swap)
    assert swap.phase is Phase.TRAINING


def test_the_time_of_every_step_is_known_and_so_is_its_deadline() -> None:
    clock = Clock()
    swap = machine(clock)
    clock.now += 70.0
    swap.end_turn()
    for seconds in range(1, 6):
        clock.now += seconds
        assert (swap.lasted_s, swap.left_s) == (seconds, 10.0 - seconds)
        swap.advance()
    assert swap.last == dict(zip(TO_GENERATING, map(float, range(1, 6)), strict=True))
    assert swap.seconds[Phase.TRAINING] == 70.0
    swap.begin_turn()
    clock.now += 20.0
    assert swap.left_s == 0.0


def test_the_share_of_swaps_counts_from_the_second_turn_on() -> None:
    clock = Clock()
    swap = machine(clock)
    clock.now += 70.0
    swap.end_turn()
    clock.now += 9.0
    walk(swap)
    swap.begin_turn()
    clock.now += 9.0
    assert swap.swap_share == 0.0
    walk(swap)
    clock.now += 80.0
    swap.end_turn()
    clock.now += 20.0
    assert swap.swap_share == 20.0 / 100.0


@given(st.lists(st.sampled_from(["advance", "fail", "turn", "wait"]), max_size=200), st.integers(1, 4))
def test_whatever_fails_it_ends_with_one_side_or_an_error_that_says_why(events: list[str], attempts: int) -> None:
    clock = Clock()
    swap = machine(clock, attempts=attempts)
    learner_loaded, previous = True, swap.phase
    try:
        for event in events:
            clock.now += 1.0
            if event == "turn" and not swap.in_swap:
                (swap.begin_turn if swap.phase is Phase.GENERATING else swap.end_turn)()
            elif event in ("advance", "fail") and swap.in_swap:
                swap.advance() if event == "advance" else swap.fail("why")
            if previous is Phase.OFFLOADING and swap.phase is Phase.WAKING:
                learner_loaded = False
            if swap.phase is Phase.ONLOADING:
                learner_loaded = True
            # Generators take memory only after the learner has given its own back.
            if swap.phase in (*TO_GENERATING[1:], Phase.GENERATING):
                assert not learner_loaded
            if swap.phase is Phase.TRAINING:
                assert learner_loaded
            previous = swap.phase
        while swap.in_swap:
            swap.advance()
    except SwapError as error:
        assert "why" in error.message
