"""The chooser: all is dealt, to the least loaded, and nobody gets more than it asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollmesh.buffer.server.load_balancer import Wish, share_of

_wishes = st.lists(st.builds(Wish, st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6)


def dealt(wishes: list[Wish], available: int) -> list[int]:
    return [share_of(wish, wishes, available, rev=0) for wish in wishes]


@given(_wishes, st.integers(0, 60))
def test_everything_is_dealt_within_the_credits_to_the_least_loaded(wishes: list[Wish], available: int) -> None:
    shares = dealt(wishes, available)
    assert sum(shares) == min(available, sum(wish.credits for wish in wishes)), "each asks for its own: none overlap"
    for wish, share in zip(wishes, shares, strict=True):
        assert 0 <= share <= wish.credits
        size = max(1, wish.outstanding + wish.credits)
        for other, others in zip(wishes, shares, strict=True):
            if share and others < other.credits:
                # Its last group did not come before another one's next.
                last = (wish.outstanding + share - 1) / size
                assert last <= (other.outstanding + others) / max(1, other.outstanding + other.credits)


@given(_wishes, st.integers(0, 60), st.integers(0, 5))
def test_more_for_all_is_never_less_for_one(wishes: list[Wish], available: int, more: int) -> None:
    before, after = dealt(wishes, available), dealt(wishes, available + more)
    assert all(a <= b for a, b in zip(before, after, strict=True))


def test_the_idle_come_first_and_size_counts() -> None:
    assert dealt([Wish(4, 4), Wish(8, 0)], 2) == [0, 2]
    assert dealt([Wish(4, 0), Wish(8, 0)], 6) == [2, 4], "equal loads, not equal numbers"
    assert dealt([Wish(2, 0), Wish(2, 0)], 1) == [1, 0], "of equals, who has waited longer"
    assert dealt([Wish(0, 0), Wish(2, 9)], 1) == [0, 1]


def test_who_was_refused_is_not_waited_for_until_the_figures_change() -> None:
    refused = Wish(4, 0, refused_at=7)
    eager = Wish(4, 3)
    assert share_of(eager, [refused, eager], 2, rev=7) == 2
    assert share_of(eager, [refused, eager], 2, rev=8) == 0


def test_who_does_not_answer_is_not_waited_for() -> None:
    silent, eager = Wish(4, 0, answers=False), Wish(4, 3)
    assert share_of(eager, [silent, eager], 2, rev=0) == 2
    silent.answers = True
    assert share_of(eager, [silent, eager], 2, rev=0) == 0
