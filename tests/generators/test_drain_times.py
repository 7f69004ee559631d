"""The time of an end in order: it is enough for all steps, whatever there is of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rollmesh.generators.drain_times import USUAL, DrainTimes


@given(st.floats(0.0, 1e6))
def test_all_steps_end_in_time(total_s: float) -> None:
    times = DrainTimes.within(total_s)
    assert times.running_s >= 0.0
    assert times.running_s + 3 * times.storing_s <= total_s
    assert times.storing_s <= USUAL.storing_s


def test_what_the_shortest_notices_of_the_clouds_leave() -> None:
    assert DrainTimes.within(120.0) == DrainTimes(running_s=102.0, storing_s=5.0)
    assert DrainTimes.within(30.0) == DrainTimes(running_s=12.0, storing_s=5.0)
