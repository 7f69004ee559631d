"""A run from its first to its last step: what it writes, what the commands say of it, and who may join it."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.integration.mesh import audit

ROOT = Path(__file__).resolve().parent.parent.parent


def rollmesh(*arguments: str, cwd: Path = ROOT, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollmesh.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, cwd=cwd)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_run_writes_what_it_promises(start_mesh) -> None:
    run = start_mesh("--learner.steps=200", "--logging.samples_per_step=2", "--eval.every_steps=100")
    run.wait_step(3)
    status = rollmesh("status", "--mesh", run.address())
    assert status.returncode == 0, status.stderr
    assert len(re.findall(r"generator +127\.0\.0\.1:\d+", status.stdout)) == 2, status.stdout
    assert rollmesh("ledger", "--mesh", run.address()).returncode == 0
    for service, figure in (
        ("buffer", "rollmesh_buffer_groups_admitted_total"),
        ("learner", "rollmesh_learner_steps"),
        ("generator-0", "rollmesh_generator_tokens_generated"),
        ("reward", "rollmesh_reward"),
    ):
        log = (run.folder / "logs" / f"{service}.log").read_text()
        address = re.search(r"metrics at (http://[\d.:]+/metrics)", log)
        assert address, log
        with urllib.request.urlopen(address[1], timeout=10) as answer:
            assert figure in answer.read().decode()
    assert run.finish() == 0, run.tail()
    audit(run)
    summary = run.summary()
    for key in ("held_out_first", "held_out_last", "steps", "training_s", "tokens_per_s_generated", "staleness"):
        assert summary[key] is not None, key
    assert set(summary["peak_memory_mb"]) >= {"buffer", "learner", "generator-0", "reward"}
    assert max(int(age) for age in summary["staleness"]) <= 2
    assert [row["step"] for row in summary["held_out"]] == [0, 100, 200]
    samples = rollmesh("samples", str(run.folder), "--worst")
    assert samples.returncode == 0, samples.stderr
    assert "reward" in samples.stdout
    assert rollmesh("report", str(run.folder)).returncode == 0
    assert (run.folder / "report.html").read_text().count("<svg") >= 4
    steps = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if "critic/score/mean" in row] == list(range(1, 201))
    exported = rollmesh("export", str(run.folder), str(run.folder / "hf"), timeout=120)
    assert exported.returncode == 0, exported.stderr
    assert (run.folder / "hf" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_generator_with_nothing_but_the_address_joins_and_works(start_mesh, tmp_path: Path) -> None:
    run = start_mesh("--learner.steps=10", "--rollout.replicas=0")
    run.wait_for("buffer is up")
    run.wait_for("learner is up")
    empty = tmp_path / "empty"
    empty.mkdir()
    generator = subprocess.Popen(
        [sys.executable, "-m", "rollmesh.cli", "generator", "--mesh", run.address(), "--member-id", "by-hand"],
        cwd=empty,
        env={"PATH": os.environ["PATH"], "HOME": str(empty), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    )
    try:
        run.wait_step(5)
        assert list(empty.iterdir()) == []
        assert run.finish() == 0, run.tail()
        assert generator.wait(30) == 0, "it leaves when the run has finished"
    finally:
        generator.kill()
    audit(run)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_learner_ranks_finish_the_run(start_mesh) -> None:
    run = start_mesh("--learner.steps=6", "--learner.ranks=2", "--rollout.replicas=1")
    assert run.finish(150) == 0, run.tail()
    audit(run)
    assert run.summary()["steps"] == 6


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_on_policy_at_zero_staleness_never_hangs(start_mesh) -> None:
    run = start_mesh("--learner.steps=10", "--buffer.max_staleness=0")
    assert run.finish() == 0, run.tail()
    audit(run)
    assert set(run.summary()["staleness"]) == {"0"}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_run_behind_a_token(start_mesh, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("a shared secret\n")
    run = start_mesh("--learner.steps=40", f"--security.token_file={token}")
    run.wait_step(1)
    refused = rollmesh("status", "--mesh", run.address())
    assert refused.returncode == 2, refused.stdout
    assert "token" in refused.stderr
    assert rollmesh("status", "--mesh", run.address(), "--token-file", str(token)).returncode == 0
    assert run.finish() == 0, run.tail()
    audit(run)
