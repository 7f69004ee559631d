"""Checkpoints that take too much of the time are told of, once."""

from __future__ import annotations

import logging

import pytest

from rollmesh.learner.checkpoint.write_pace import WritePace


@pytest.mark.parametrize(
    ("interval_s", "took_s", "told"),
    [(600.0, 182.0, False), (600.0, 210.0, True), (200.0, 46.0, False), (100.0, 46.0, True), (1.0, 5.0, False)],
)
def test_a_write_that_takes_over_a_third_of_the_interval_is_told_of(
    interval_s: float, took_s: float, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    pace = WritePace(began=50.0)
    pace.due(50.0 + interval_s)
    pace.written(took_s)
    pace.written(2 * took_s if told else took_s)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == told
    if told:
        assert f"takes {took_s:.0f} s to be written, and one is due every {interval_s:.0f} s" in warnings[0]
        assert f"checkpoint.every_s to {12 * took_s:.0f}" in warnings[0]


def test_a_write_that_nothing_but_a_request_asked_for_is_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    WritePace(began=0.0).written(1000.0)
    assert not caplog.records
