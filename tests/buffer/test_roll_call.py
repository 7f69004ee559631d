"""What a front knows of the leases in a holder's hands."""

from __future__ import annotations

import pytest

from buffer.roll_call import RollCall
from mesh.errors import UnreachableError

A, B, C = ("train-1", "a1"), ("train-2", "a2"), ("train-3", "a3")


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def roll(clock: Clock) -> RollCall:
    return RollCall(3.0, clock)


def test_silence_is_counted_from_the_first_unanswered_grant(roll: RollCall, clock: Clock) -> None:
    assert roll.silent_s == 0.0
    roll.send(A)
    roll.send(B)
    clock.now = 11.0
    roll.send(C)
    assert (roll.silent_s, roll.under_way) == (1.0, 3)
    roll.hear(2, None)
    clock.now = 11.5
    assert roll.silent_s == 0.5, "one is still on its way"
    roll.hear(3, None)
    assert (roll.silent_s, roll.under_way) == (0.0, 0)


def test_what_is_named_and_what_is_under_way_may_be_held(roll: RollCall) -> None:
    roll.send(A)
    roll.send(B)
    roll.hear(1, [A])
    roll.send(C)
    roll.hear(3, None)  # said after the inventory, before anybody looked at it
    assert roll.take() == {A, B, C}
    assert roll.take() is None, "an inventory is looked at once"
    roll.hear(3, [])
    assert roll.take() == set(), "all three are forgotten"


def test_what_was_neither_counted_nor_named_is_unheard_of(roll: RollCall) -> None:
    """A lease that is offered again is on its way once more, and its holder works on it."""
    roll.hear(0, [A])
    for lease in (A, B, C):
        roll.send(lease)
    assert roll.unheard() == [B, C]
    roll.hear(2, None)
    assert roll.unheard() == [C]


def test_who_has_nothing_is_not_looked_at_again(roll: RollCall) -> None:
    roll.hear(0, [])
    assert roll.take() is None
    roll.hear(0, [A])
    assert roll.take() == {A}, "it believes to have something"
    roll.hear(0, [])
    assert roll.take() == set()
    roll.hear(0, [])
    assert roll.take() is None


def test_questions_come_three_times_a_term_and_are_to_be_answered_within_one(roll: RollCall, clock: Clock) -> None:
    assert roll.ask() == 3000
    assert roll.ask() == 0
    clock.now += 1.0
    assert roll.ask() == 3000
    roll.hear(0, [])
    clock.now += 2.9
    assert roll.ask() == 3000
    clock.now += 2.9
    assert roll.ask() == 3000, "within the term"
    clock.now += 0.2
    with pytest.raises(UnreachableError, match="what it holds"):
        roll.ask()
