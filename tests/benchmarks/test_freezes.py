"""The schedule of the freezes, and what is made of their outcomes."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.faults import freezes as benchmark
from benchmarks.faults.freezes import LEASE_S, SERVICES, Freeze, Outcome, freezes, recovery, report
from tests.faults.observe import Step, StepWatch
from tests.faults.processes import FaultError


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


class Run(StepWatch):
    """Trains a step whenever one is waited for; up to a number of them."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._left = steps
        super().__init__(folder / "metrics.jsonl")

    def wait_step(self, after: float, until: float, *, nth: int = 1, incarnation: int = 0) -> Step:
        assert until > time.monotonic(), "a time that has passed"
        if not self._left:
            raise FaultError("no step")
        self._left -= 1
        self._file.write(json.dumps({"incarnation": 1, "version": 1, "staleness/max": 0}) + "\n")
        self._file.flush()
        return super().wait_step(after, until, nth=nth, incarnation=incarnation)

    def close(self) -> None:
        super().close()
        self._file.close()


@pytest.mark.parametrize("steps", [3, 1, 0])
def test_a_run_has_recovered_when_three_more_steps_came(tmp_path: Path, steps: int) -> None:
    freeze, run = Freeze("front", True, 0.0, 2.0), Run(tmp_path, steps)
    outcome = recovery(freeze, True, time.monotonic(), run, lambda: "learner waits")
    run.close()
    assert (outcome.next_step_s is None) == (steps == 0)
    assert (outcome.stall_s is None) == (steps == 3)
    assert outcome.said == ("" if steps == 3 else "learner waits")


def test_a_mesh_waits_for_steps_until_a_time_to_come(tmp_path: Path) -> None:
    mesh = object.__new__(benchmark.Mesh)
    mesh.steps = Run(tmp_path, 1)
    mesh.until_it_trains()
    mesh.steps.close()
