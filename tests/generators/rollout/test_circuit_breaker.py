"""How many groups are taken on while groups fail: by a clock of the test's own."""

from __future__ import annotations

from rollmesh.generators.rollout.circuit_breaker import FIRST_PAUSE_S, IN_A_ROW, MAX_PAUSE_S, CircuitBreaker


def test_one_at_a_time_after_growing_pauses_until_one_is_answered() -> None:
    breaker, now = CircuitBreaker(), 100.0
    for _ in range(IN_A_ROW - 1):
        assert breaker.failed(now, "odd") == 0
        assert breaker.bounds(7, now, at_work=True) == 7
    pauses = []
    for _ in range(8):
        pause = breaker.failed(now, "odd")
        pauses.append(pause)
        assert breaker.bounds(7, now + pause - 0.01, at_work=False) == 0
        assert breaker.bounds(7, now + pause, at_work=True) == 0, "one at a time"
        assert breaker.bounds(7, now + pause, at_work=False) == 1
        assert breaker.bounds(0, now + pause, at_work=False) == 0
        assert "odd" in breaker.waiting_reason
        now += pause
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == MAX_PAUSE_S
    breaker.answered()
    assert breaker.bounds(7, now, at_work=True) == 7
    assert breaker.waiting_reason == ""


def test_groups_that_were_under_way_prolong_no_pause() -> None:
    breaker = CircuitBreaker()
    pauses = [breaker.failed(100.0, "odd") for _ in range(40)]
    assert set(pauses[IN_A_ROW:]) == {FIRST_PAUSE_S}
    assert breaker.bounds(7, 100.0 + FIRST_PAUSE_S, at_work=False) == 1
    assert breaker.failed(100.0 + FIRST_PAUSE_S, "odd") == 2 * FIRST_PAUSE_S
