"""Learner and generators on the same devices, as a user starts them; the same run continues with their own."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmesh.learner.placement.swap import TO_GENERATING, TO_TRAINING
from rollmesh.mesh.config.derived.memory_release import REST_NAME
from tests.command import Command
from tests.integration.mesh import MeshRun, audit

_STEPS = 4
_STATUS_S = 60.0


@pytest.mark.slow
def test_a_run_takes_turns_yields_when_asked_and_continues_split(
    start_mesh: Callable[..., MeshRun], rollmesh: Command, tmp_path: Path
) -> None:
    """Two ranks with a critic and a reference model, an evaluation amid the run and one at its end."""
    same = (
        f"--eval.every_steps={_STEPS // 2}",
        "--rollout.replicas=1",
        "--learner.batch.groups=8",
        "--algorithm={name: ppo, kl: {where: loss}}",
        "--buffer.max_staleness=1",
    )
    run = start_mesh("--placement=collocated", "--learner.ranks=2", f"--learner.steps={_STEPS}", *same)
    run.wait_step(1)
    yielded = rollmesh("yield", str(run.folder), "--hold", "600")
    assert yielded.returncode == 0, yielded.stderr
    # The generator's own word comes with its next heartbeat; until then the turn is that of generators that start.
    deadline = time.monotonic() + _STATUS_S
    while not re.search(r"turn .*generating", (status := rollmesh("status", str(run.folder))).stdout):
        assert time.monotonic() < deadline, status.stdout + status.stderr
    assert rollmesh("resume", str(run.folder)).returncode == 0
    assert run.finish() == 0, run.tail()
    audit(run)
    summary = run.summary()
    assert summary["steps"] == _STEPS
    assert [row["step"] for row in summary["held_out"]] == [0, _STEPS // 2, _STEPS]
    assert summary["swaps"]["turns"] >= 2
    assert summary["swaps"]["taken_back"] == 0
    turns = [json.loads(line) for line in (run.folder / "turns.jsonl").read_text().splitlines()]
    phases = [turn["phase"] for turn in turns]
    swaps = ["training", *TO_GENERATING, "generating", *TO_TRAINING]
    assert phases[: len(swaps)] == swaps
    assert {turn["reason"] for turn in turns} == {""}
    assert set(summary["memory_by_phase_mb"]) >= {"generating", "training"}
    # Responses stay as stale as they would be with devices of their own.
    assert max(int(age) for age in summary["staleness"]) <= 1
    assert not (run.folder / REST_NAME).exists()

    continued = start_mesh(f"--learner.steps={_STEPS + 1}", *same)
    assert continued.finish() == 0, continued.tail()
    audit(continued)
    assert continued.summary()["steps"] == _STEPS + 1
