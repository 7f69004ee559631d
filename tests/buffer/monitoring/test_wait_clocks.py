"""Waiting clocks."""

from __future__ import annotations

from rollmesh.buffer.monitoring.wait_clocks import INSERTS, SAMPLES, WaitClocks


def test_a_wait_counts_while_it_lasts_and_only_once() -> None:
    now = [0.0]
    waits = WaitClocks(clock=lambda: now[0])
    waits.begin(INSERTS, "learner", "no groups")
    now[0] = 1.5
    assert waits.drain_ms(INSERTS) == 1500
    assert waits.reason(INSERTS) == "no groups"
    now[0] = 2.0
    waits.end(INSERTS, "learner")
    now[0] = 9.0
    assert waits.drain_ms(INSERTS) == 500
    assert waits.drain_ms(SAMPLES) == 0
    assert waits.reason(INSERTS) == ""


def test_waits_of_several_add_up_and_the_longest_gives_the_reason() -> None:
    now = [0.0]
    waits = WaitClocks(clock=lambda: now[0])
    waits.begin(SAMPLES, "g1", "gate")
    now[0] = 1.0
    waits.begin(SAMPLES, "g2", "no tasks")
    now[0] = 2.0
    assert waits.drain_ms(SAMPLES) == 3000
    assert waits.reason(SAMPLES) == "gate"
