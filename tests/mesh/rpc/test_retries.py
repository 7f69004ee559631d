"""When a peer that does not answer is given up."""

from __future__ import annotations

from rollmesh.mesh.rpc.retries import Retries


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_peer_is_given_up_after_so_many_seconds_of_failures_in_a_row() -> None:
    retries = Retries(60.0, clock := Clock())
    clock.now += 1000.0
    assert not retries.record_failure(), "a long silence before the first failure counts nothing"
    for _ in range(5):
        clock.now += 10.0
        assert not retries.record_failure()
    retries.record_answer()
    for _ in range(6):
        clock.now += 10.0
        assert not retries.record_failure()
    clock.now += 10.0
    assert retries.record_failure()
    assert retries.failing_s == 60.0


def test_who_was_stopped_itself_tries_again() -> None:
    retries = Retries(60.0, clock := Clock())
    for away_s in (500.0, 500.0):
        clock.now += away_s
        assert not retries.record_failure()
    clock.now += 29.0
    assert not retries.record_failure()
    clock.now += 1.0
    assert retries.record_failure()


def test_failures_are_told_of_at_intervals_that_double() -> None:
    retries = Retries(60.0, clock := Clock())
    for _ in range(2):
        told = []
        while not retries.record_failure():
            if retries.should_log():
                told.append(retries.failing_s)
            clock.now += 0.25
        assert told == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
        retries.record_answer()
