"""The end of a rank's process: one message, and the error's exit code."""

from __future__ import annotations

import logging

import pytest

from rollmesh.learner.liveness.rank_exit import run_rank
from rollmesh.mesh.errors import ConfigError, RankLostError


def test_work_that_is_done_ends_with_0() -> None:
    assert run_rank(lambda: None) == 0


def test_an_expected_failure_is_one_message_and_its_exit_code(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise ConfigError("rollout.n is 0", hint="set it")

    assert run_rank(fail) == ConfigError.exit_code
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "rollout.n is 0" in record.getMessage()


def test_a_lost_rank_ends_the_process_at_once() -> None:
    ended: list[int] = []

    def lose() -> None:
        raise RankLostError("rank 1 has died")

    assert run_rank(lose, end=ended.append) == RankLostError.exit_code
    assert ended == [RankLostError.exit_code]


def test_a_mistake_of_the_code_is_no_expected_failure() -> None:
    with pytest.raises(ZeroDivisionError):
        run_rank(lambda: 1 / 0)
