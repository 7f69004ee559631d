"""A front's knowledge of the leases that a holder may have."""

from __future__ import annotations

import pytest

from rollmesh.buffer.protocol.leases import Lease
from rollmesh.buffer.server.lease_roll_call import RollCall
from rollmesh.mesh.errors import UnreachableError
from rollmesh.protos import buffer_pb2 as pb

A, B, C = Lease("train-1", "a1"), Lease("train-2", "a2"), Lease("train-3", "a3")


def _request(received: int, inventory: list[Lease] | None = None) -> pb.SampleRequest:
    named = None if inventory is None else pb.Inventory(leases=[lease.to_proto() for lease in inventory])
    return pb.SampleRequest(received=received, inventory=named)


class Clock:
    now = 10.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def roll(clock: Clock) -> RollCall:
    return RollCall(3.0, 1.0, clock)


def test_who_owes_word_of_a_lease_gets_no_more_and_is_given_up(roll: RollCall, clock: Clock) -> None:
    roll.inquire_if_due()
    roll.record_request(_request(0, []))
    roll.record_sent(A)
    roll.record_sent(B)
    clock.now = 10.4
    roll.record_sent(C)
    assert roll.is_responsive
    clock.now = 10.6
    assert (roll.is_responsive, roll.in_transit) == (False, 3), "silence counts from the first of them"
    roll.record_request(_request(2))
    clock.now = 11.5
    roll.check_alive()
    assert not roll.is_responsive, "one is still on its way"
    clock.now = 11.7
    with pytest.raises(UnreachableError, match="not received"):
        roll.check_alive()
    roll.record_request(_request(3))
    roll.check_alive()
    assert (roll.is_responsive, roll.in_transit) == (True, 0)


def test_who_names_leases_without_being_asked_has_not_answered(roll: RollCall) -> None:
    roll.record_request(_request(0, [A]))
    assert not roll.is_responsive
    roll.inquire_if_due()
    roll.record_request(_request(0))
    assert not roll.is_responsive
    roll.record_request(_request(0, [A]))
    assert roll.is_responsive
    roll.inquire_if_due()
    assert roll.is_responsive, "once is enough on a stream"


def test_what_is_named_and_what_is_under_way_may_be_held(roll: RollCall) -> None:
    roll.record_sent(A)
    roll.record_sent(B)
    roll.record_request(_request(1, [A]))
    roll.record_sent(C)
    roll.record_request(_request(3))  # said after the inventory, before it was read
    assert roll.pop_inventory() == {A, B, C}
    assert roll.pop_inventory() is None, "an inventory is looked at once"
    roll.record_request(_request(3, []))
    assert roll.pop_inventory() == set(), "all three are forgotten"


def test_what_was_neither_counted_nor_named_is_unheard_of(roll: RollCall) -> None:
    """A lease that is offered again is on its way once more, and its holder works on it."""
    roll.record_request(_request(0, [A]))
    for lease in (A, B, C):
        roll.record_sent(lease)
    assert roll.unacknowledged() == [B, C]
    roll.record_request(_request(2))
    assert roll.unacknowledged() == [C]


def test_who_has_nothing_is_looked_at_whenever_it_says_so(roll: RollCall) -> None:
    """Redis may have gone back to a time at which it had something."""
    for _ in range(3):
        roll.record_request(_request(0, []))
        assert roll.pop_inventory() == set()
        assert roll.pop_inventory() is None, "it has said nothing since"


def test_questions_come_three_times_a_term_and_are_to_be_answered_within_one(roll: RollCall, clock: Clock) -> None:
    assert roll.inquire_if_due() == 3000
    assert (roll.inquire_if_due(), roll.due_s) == (0, 1.0)
    clock.now += 1.0
    assert roll.due_s == 0.0
    assert roll.inquire_if_due() == 3000
    roll.record_request(_request(0, []))
    clock.now += 2.9
    assert roll.inquire_if_due() == 3000
    clock.now += 2.9
    assert roll.inquire_if_due() == 3000, "within the term"
    roll.check_alive()
    clock.now += 0.2
    with pytest.raises(UnreachableError, match="what it holds"):
        roll.check_alive()
