"""The dealer: all groups are dealt, to the least loaded, no generator gets more than it asked for, few are woken."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from rollmesh.buffer.policy.rules import TableRules
from rollmesh.buffer.server.admission_dealer import AdmissionDealer, GeneratorDemand, Refusal
from rollmesh.buffer.store.table_snapshot import TableSnapshot
from rollmesh.mesh.trajectory.versions import PolicyVersion

V3, V4 = PolicyVersion(1, 3), PolicyVersion(1, 4)
OPEN = TableSnapshot(rev=1, incarnation=1, version=4, u=4)
_demands = st.lists(
    st.builds(GeneratorDemand, st.integers(0, 20), st.integers(0, 20), st.just(V4)), min_size=1, max_size=6
)


def dealer_of(demands: list[GeneratorDemand], rules: TableRules | None = None) -> AdmissionDealer:
    dealer = AdmissionDealer(rules or TableRules(1, 0, bounded=False))
    for demand in demands:
        dealer.offer(demand)
    return dealer


def dealt(demands: list[GeneratorDemand], available: int) -> list[int]:
    dealer_of(demands).deal(replace(OPEN, pending=available))
    shares = [demand.share for demand in demands]
    for demand in demands:
        demand.share = demand._since = demand._entry = 0
    return shares


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
    assert dealt([GeneratorDemand(4, 4, V4), GeneratorDemand(8, 0, V4)], 2) == [0, 2]
    assert dealt([GeneratorDemand(4, 0, V4), GeneratorDemand(8, 0, V4)], 6) == [2, 4], "equal loads, not equal numbers"
    assert dealt([GeneratorDemand(2, 0, V4), GeneratorDemand(2, 0, V4)], 1) == [1, 0], "of equals, who waited longer"
    assert dealt([GeneratorDemand(0, 0, V4), GeneratorDemand(2, 9, V4)], 1) == [0, 1]


def test_those_that_get_nothing_are_not_woken() -> None:
    demands = [GeneratorDemand(2, number % 2, V4) for number in range(5000)]
    dealer = dealer_of(demands)
    got = dealer.deal(replace(OPEN, pending=3))
    assert got == demands[0:6:2]
    assert [demand for demand in demands if demand.woken.is_set()] == got
    assert dealer.deal(replace(OPEN, rev=2, pending=3)) == [], "what was dealt and not asked for is no one else's"
    dealer.settle(got[0])
    assert dealer.deal(replace(OPEN, rev=3, pending=3)) == [demands[6]]


def test_each_version_has_the_room_that_the_gate_leaves_it() -> None:
    rules = TableRules(groups_per_step=2, max_staleness=1)
    old, new = GeneratorDemand(9, 0, V3), GeneratorDemand(9, 9, V4)
    dealer = dealer_of([old, new], rules)
    # At u = 4 a group of version 3 may be one of the first two, one of version 4 of the first four.
    snapshot = replace(OPEN, pending=9, demand=1)
    assert (dealer.room(snapshot, V3), dealer.room(snapshot, V4)) == (1, 3)
    dealer.deal(snapshot)
    assert (old.share, new.share) == (1, 2)
    assert dealer.room(replace(snapshot, incarnation=2), V4) == dealer.room(replace(snapshot, suspect=1), V4) == 0


def test_who_was_refused_is_not_asked_for_again_until_the_table_changes() -> None:
    refused, equal, other = GeneratorDemand(4, 0, V4), GeneratorDemand(4, 3, V4), GeneratorDemand(4, 9, V3)
    dealer = dealer_of([refused, equal, other])
    dealer.deal(replace(OPEN, pending=1))
    assert refused.share == 1
    dealer.refuse(V4, Refusal(1, "pinned to another version"))
    dealer.settle(refused)
    dealer.offer(refused)
    assert dealer.deal(replace(OPEN, pending=1)) == [other], "those with the same version would be refused as well"
    dealer.settle(other)
    assert dealer.deal(replace(OPEN, rev=2, pending=1)) == [equal] or refused.share == 1


def test_a_stream_that_ends_leaves_its_share_to_others() -> None:
    gone, other = GeneratorDemand(4, 0, V4), GeneratorDemand(4, 3, V4)
    dealer = dealer_of([gone, other])
    assert dealer.deal(replace(OPEN, pending=2)) == [gone]
    dealer.withdraw(gone)
    dealer.settle(gone)
    assert dealer.deal(replace(OPEN, pending=2)) == [other]
    assert other.share == 2


def test_who_offers_again_and_again_takes_no_memory() -> None:
    """While the gate is closed each stream renews its offer every second, and the least loaded one stays the first."""
    _idle, *busy = demands = [GeneratorDemand(4, number, V4) for number in range(10)]
    dealer = dealer_of(demands)
    for _ in range(1000):
        for demand in busy:
            dealer.offer(demand)
        assert dealer.deal(OPEN) == []
    assert sum(len(queue) for queue in dealer._waiting.values()) < 100
    assert dealer.deal(replace(OPEN, pending=40)) == demands
