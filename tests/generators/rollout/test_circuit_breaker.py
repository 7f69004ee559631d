"""The number of groups admitted while groups fail: by a clock of the test's own."""

from __future__ import annotations

from rollmesh.generators.rollout.circuit_breaker import FAILURES_IN_A_ROW, FIRST_PAUSE_S, MAX_PAUSE_S, CircuitBreaker


def test_one_at_a_time_after_growing_pauses_until_one_is_answered() -> None:
    breaker, now = CircuitBreaker(), 100.0
    for _ in range(FAILURES_IN_A_ROW - 1):
        assert breaker.record_failure(now, "odd") == 0
        assert breaker.limit_credits(7, now, at_work=True) == 7
    pauses = []
    for _ in range(8):
        pause = breaker.record_failure(now, "odd")
        pauses.append(pause)
        assert breaker.limit_credits(7, now + pause - 0.01, at_work=False) == 0
        assert breaker.limit_credits(7, now + pause, at_work=True) == 0, "one at a time"
        assert breaker.limit_credits(7, now + pause, at_work=False) == 1
        assert breaker.limit_credits(0, now + pause, at_work=False) == 0
        assert "odd" in breaker.waiting_reason
        now += pause
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == MAX_PAUSE_S
    breaker.record_success()
    assert breaker.limit_credits(7, now, at_work=True) == 7
    assert breaker.waiting_reason == ""


def test_groups_that_were_under_way_prolong_no_pause() -> None:
    breaker = CircuitBreaker()
    pauses = [breaker.record_failure(100.0, "odd") for _ in range(40)]
    assert set(pauses[FAILURES_IN_A_ROW:]) == {FIRST_PAUSE_S}
    assert breaker.limit_credits(7, 100.0 + FIRST_PAUSE_S, at_work=False) == 1
    assert breaker.record_failure(100.0 + FIRST_PAUSE_S, "odd") == 2 * FIRST_PAUSE_S
