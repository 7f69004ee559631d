"""The schedule of the freezes, and what is made of their outcomes."""

from __future__ import annotations

from collections import Counter

from benchmarks.freezes import LEASE_S, SERVICES, Freeze, Outcome, freezes, report


def test_a_seed_freezes_every_service_equally_often_for_half_a_lease_to_three() -> None:
    found = list(freezes(1, 40, list(SERVICES)))
    assert found == list(freezes(1, 40, list(SERVICES)))
    assert found != list(freezes(2, 40, list(SERVICES)))
    assert Counter(freeze.service for freeze in found) == dict.fromkeys(SERVICES, 10)
    assert all(0.5 * LEASE_S <= freeze.lasts_s <= 3.0 * LEASE_S for freeze in found)
    assert {freeze.tree for freeze in found} == {False, True}


def test_the_report_has_a_row_per_service_and_one_for_all() -> None:
    front, learner = Freeze("front", True, 0.0, 2.0), Freeze("learner", False, 0.0, 12.0)
    outcomes = [
        Outcome(front, False, 1.0),
        Outcome(front, True, 3.0),
        Outcome(learner, True, None, stall_s=151.0, said="learner waits"),
    ]
    assert report(outcomes).splitlines()[2:] == [
        "| front | 2 | 1.00 | 3.00 | 3.00 | 1 | 0 |",
        "| learner | 1 | - | - | - | 1 | 1 |",
        "| all | 3 | 1.00 | 3.00 | 3.00 | 2 | 1 |",
    ]
