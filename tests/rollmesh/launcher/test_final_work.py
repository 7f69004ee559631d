"""The time that a service gets to end, and the work that gives it more."""

from __future__ import annotations

from rollmesh.launcher.final_work import DrainClock
from rollmesh.launcher.services import _LEARNER_DRAIN_S
from rollmesh.learner.checkpoint.deadlines import LAST_S, WAIT_S


def over_at(clock: DrainClock, start: float, works: dict[float, str]) -> float:
    """The moment at which a service's time is over, given what it answers before the times that are the keys."""
    now = start
    while pause_s := clock.pause_s(now):
        now += pause_s
        clock.observe(now, next((work for until, work in works.items() if now < until), ""))
    return now


def test_a_service_without_work_has_its_drain_time() -> None:
    clock = DrainClock(100.0, idle_s=15.0)
    assert over_at(clock, 100.0, {}) == 115.0
    assert clock.overdue(115.0) == "did not end within 15 s of being asked to, killed"
    assert over_at(DrainClock(100.0, idle_s=15.0), 100.0, {1e9: "checkpointing"}) == 115.0, "none was promised"


def test_a_checkpoint_of_many_minutes_ends_in_order_and_a_learner_that_hangs_after_it_does_not() -> None:
    clock = DrainClock(0.0, idle_s=_LEARNER_DRAIN_S, work_s=LAST_S)
    ended = over_at(clock, 0.0, {60.0: "training", 900.0: "checkpointing"})
    assert 1015.0 < ended <= 1020.0
    assert clock.overdue(ended) == f"did not end within {ended:.0f} s of being asked to (last: checkpointing), killed"


def test_work_without_an_end_is_ended_after_the_learners_own_deadlines() -> None:
    ended = over_at(DrainClock(0.0, idle_s=_LEARNER_DRAIN_S, work_s=LAST_S), 0.0, {1e9: "checkpointing"})
    assert 2 * WAIT_S < ended == LAST_S + _LEARNER_DRAIN_S


def test_only_other_work_is_news() -> None:
    clock = DrainClock(0.0, idle_s=120.0, work_s=1000.0)
    said = ["training", "training", "", "training", "checkpointing", "", "checkpointing"]
    assert [clock.observe(float(now), work) for now, work in enumerate(said)] == [True] + 3 * [False] + [
        True,
        False,
        False,
    ]
