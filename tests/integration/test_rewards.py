"""Rewards in a whole run: somebody else's server, functions that fail, and what becomes of the groups."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.mesh import audit


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_third_party_server_scores_a_run(start_mesh, third_party_server: str) -> None:
    run = start_mesh("--learner.steps=8", f"--reward.endpoints=[{third_party_server}]")
    assert run.finish() == 0, run.tail()
    audit(run)
    assert not (run.folder / "services" / "reward.json").exists(), "no reward service of ours was started"
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert any("rewards/brevity/mean" in row for row in steps)
    check = subprocess.run(
        [sys.executable, "-m", "rollmesh.cli", "reward", "check", third_party_server],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert check.returncode == 0, check.stdout + check.stderr


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_scorers_that_raise_or_answer_nan_never_become_a_zero(start_mesh, tmp_path: Path) -> None:
    scorer = tmp_path / "flaky.py"
    scorer.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    if len(solution_str) % 3 == 0:\n        raise KeyError('no such answer')\n"
        "    return float('nan') if len(solution_str) % 3 == 1 else 1.0\n"
    )
    run = start_mesh("--learner.steps=6", f"--reward.functions=['{scorer}:score']")
    assert run.finish() == 0, run.tail()
    audit(run)
    counters = run.summary()["ledger"]["train"]
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    rewards = [row for row in steps if "critic/score/mean" in row]
    assert {row["critic/score/min"] for row in rewards} == {1.0}, "what failed is in no statistic"
    assert sum(row["unscored_members"] for row in rewards) > 0 or counters["counters"]["failed"] > 0
