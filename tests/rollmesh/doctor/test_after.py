"""Every fault in the records of a run is found, its remedy named, and a healthy run has none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollmesh.doctor.after.diagnosis import diagnose_run
from rollmesh.doctor.findings import Severity
from tests.command import Command
from tests.rollmesh.doctor.documented import documented, is_found
from tests.rollmesh.doctor.faults_after import FAULTS
from tests.rollmesh.doctor.recorded_run import RecordedRun, config_in


@pytest.mark.parametrize("fault", FAULTS)
def test_a_recorded_fault_is_found_with_its_remedy(fault: str, tmp_path: Path) -> None:
    planted, folder = FAULTS[fault], tmp_path / "run"
    planted.run.write(folder, config_in(folder, **planted.sections))
    planted.more(folder)
    findings = list(diagnose_run(folder).findings)
    assert is_found(documented()[fault], findings), findings
    worse = {finding.check for finding in findings if finding.severity in (Severity.WARNING, Severity.PROBLEM)}
    assert worse <= {documented()[fault].check}, "one fault, and nothing else"


@pytest.mark.parametrize(("mean", "kind"), [(0.8, "too easy"), (0.2, "too hard")])
def test_rewards_without_variance_say_which_way_the_data_miss(mean: float, kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    metrics = {"frac_reward_zero_std": 0.8, "critic/score/mean": mean}
    RecordedRun(metrics=lambda _step: metrics).write(folder, config_in(folder))
    (finding,) = (found for found in diagnose_run(folder).findings if found.check == "losses")
    assert f"(mean reward {mean}: most prompts are {kind})" in finding.what


def test_late_rewards_are_named_where_they_are_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    reward = {"late": {"store": str(tmp_path / "late.db")}}
    FAULTS["rewards-far-away"].run.write(folder, config_in(folder, reward=reward))
    (finding,) = (found for found in diagnose_run(folder).findings if found.check == "time")
    assert "late rewards are waited for" in finding.what
    assert "more reward services" not in finding.remedy


def test_a_healthy_run_is_healthy(tmp_path: Path, rollmesh: Command) -> None:
    folder = tmp_path / "run"
    RecordedRun().write(folder, config_in(folder))
    done = rollmesh("doctor", str(folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"{folder}: ")
    assert "warning" not in done.stdout


def test_a_sick_run_ends_the_command_with_1_and_is_told_to_programs(tmp_path: Path, rollmesh: Command) -> None:
    folder = tmp_path / "run"
    RecordedRun(discrepancies=("trained: counted 2, found 1",)).write(folder, config_in(folder))
    done = rollmesh("doctor", str(folder), "--json")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert not told["healthy"]
    assert told["findings"][0]["severity"] == "problem"
    assert told["findings"][0]["check"] == "ledger"


def test_a_run_of_one_step_is_not_judged(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    RecordedRun(metrics=lambda step: {"incarnation": step}).write(folder, config_in(folder))
    (finding,) = (found for found in diagnose_run(folder).findings if found.check == "time")
    assert finding.severity is Severity.NOTE
    assert "fewer than two steps" in finding.what
