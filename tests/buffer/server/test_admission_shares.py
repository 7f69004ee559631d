"""The chooser: all groups are dealt, to the least loaded, and no generator gets more than it asked for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollmesh.buffer.server.admission_shares import GeneratorDemand, fair_share

_demands = st.lists(st.builds(GeneratorDemand, st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=6)


def dealt(demands: list[GeneratorDemand], available: int) -> list[int]:
    return [fair_share(demand, demands, available, rev=0) for demand in demands]


@given(_demands, st.integers(0, 60))
def test_everything_is_dealt_within_the_credits_to_the_least_loaded(
    demands: list[GeneratorDemand], available: int
) -> None:
    shares = dealt(demands, available)
    assert sum(shares) == min(available, sum(demand.credits for demand in demands)), (
        "each asks for its own: none overlap"
    )
    for demand, share in zip(demands, shares, strict=True):
        assert 0 <= share <= demand.credits
        size = max(1, demand.outstanding + demand.credits)
        for other, others in zip(demands, shares, strict=True):
            if share and others < other.credits:
                # Its last group did not come before another one's next.
                last = (demand.outstanding + share - 1) / size
                assert last <= (other.outstanding + others) / max(1, other.outstanding + other.credits)


@given(_demands, st.integers(0, 60), st.integers(0, 5))
def test_more_for_all_is_never_less_for_one(demands: list[GeneratorDemand], available: int, more: int) -> None:
    before, after = dealt(demands, available), dealt(demands, available + more)
    assert all(a <= b for a, b in zip(before, after, strict=True))


def test_the_idle_come_first_and_size_counts() -> None:
    assert dealt([GeneratorDemand(4, 4), GeneratorDemand(8, 0)], 2) == [0, 2]
    assert dealt([GeneratorDemand(4, 0), GeneratorDemand(8, 0)], 6) == [2, 4], "equal loads, not equal numbers"
    assert dealt([GeneratorDemand(2, 0), GeneratorDemand(2, 0)], 1) == [1, 0], "of equals, who has waited longer"
    assert dealt([GeneratorDemand(0, 0), GeneratorDemand(2, 9)], 1) == [0, 1]


def test_who_was_refused_is_not_waited_for_until_the_figures_change() -> None:
    refused = GeneratorDemand(4, 0, refused_at=7)
    eager = GeneratorDemand(4, 3)
    assert fair_share(eager, [refused, eager], 2, rev=7) == 2
    assert fair_share(eager, [refused, eager], 2, rev=8) == 0


def test_who_does_not_answer_is_not_waited_for() -> None:
    silent, eager = GeneratorDemand(4, 0, is_responsive=False), GeneratorDemand(4, 3)
    assert fair_share(eager, [silent, eager], 2, rev=0) == 2
    silent.is_responsive = True
    assert fair_share(eager, [silent, eager], 2, rev=0) == 0
