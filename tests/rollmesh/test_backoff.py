"""The restart budget, with a clock of its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.launcher.backoff import HUNG_WINDOW_S, WINDOW_S, RestartBudget, Restarts
from rollmesh.report.restarts import Reason


def test_delays_double_up_to_the_bound() -> None:
    budget = RestartBudget(6, first_delay_s=1.0, max_delay_s=5.0)
    assert [budget.grant(now) for now in range(7)] == [1.0, 2.0, 4.0, 5.0, 5.0, 5.0, None]


def test_budget_comes_back_with_time() -> None:
    budget = RestartBudget(1, window_s=10.0, first_delay_s=1.0)
    assert budget.grant(0.0) == 1.0
    assert budget.grant(9.9) is None
    assert budget.grant(10.0) == 1.0


@given(st.lists(st.floats(0, 100), max_size=40), st.integers(0, 4))
def test_no_window_holds_more_than_allowed(gaps: list[float], limit: int) -> None:
    budget = RestartBudget(limit, window_s=50.0)
    now, granted = 0.0, []
    for gap in gaps:
        now += gap
        if budget.grant(now) is not None:
            granted.append(now)
    for start in granted:
        assert sum(start <= moment < start + 50.0 for moment in granted) <= limit


@pytest.mark.parametrize("reason", ["hung", "frozen"])
def test_what_hangs_again_and_again_is_given_up_however_long_each_hang_takes(reason: Reason) -> None:
    restarts, hang_s = Restarts(2), 2 * WINDOW_S
    granted = [restarts.grant(hang_s * hang, reason) is not None for hang in range(3)]
    assert granted == [True, True, False]
    assert restarts.used_up(reason) == "hung more than 2 times within a day"
    assert restarts.grant(3 * hang_s, "exit") is not None, "ends have a budget of their own"
    assert restarts.grant(HUNG_WINDOW_S, reason) is not None


def test_ends_count_for_ten_minutes() -> None:
    restarts = Restarts(1)
    assert [restarts.grant(now, "exit") is not None for now in (0.0, WINDOW_S - 1, WINDOW_S)] == [True, False, True]
    assert restarts.used_up("exit") == "died more than 1 times within ten minutes"
