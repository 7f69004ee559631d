"""A whole run with the rewards of somebody else's server."""

import json
import subprocess
import sys

import pytest

from tests.integration.mesh import audit


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_third_party_server_scores_a_run(start_mesh, third_party_server: str) -> None:
    run = start_mesh("--learner.steps=8", "--rollout.replicas=1", f"--reward.endpoints=[{third_party_server}]")
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
