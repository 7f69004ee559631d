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
from tests.integration import holding
from tests.integration.mesh import MeshRun, audit

_STEPS, _GROUPS, _STALENESS = 4, 4, 1
# Questions to the run while nothing is to happen; each takes longer than a learner needs for its turn to begin.
_LOOKS = 3


# Another that continues, with other ranks and generators: test_run.py. One whose turns end: test_auto_placement.py.
@pytest.mark.slow
@pytest.mark.parametrize("continues", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_run_takes_turns_yields_when_asked_and_continues_split(
    start_mesh: Callable[..., MeshRun], rollmesh: Command, tmp_path: Path, continues: bool
) -> None:
    """Two ranks with a critic and a reference model, an evaluation amid the run and one at its end."""
    same = (
        f"--eval.every_steps={_STEPS // 2}",
        *("--rollout.replicas=1", "--rollout.n=4", f"--learner.batch.groups={_GROUPS}"),
        "--algorithm={name: ppo, kl: {where: loss}}",
        f"--buffer.max_staleness={_STALENESS}",
    )
    run = start_mesh(
        *("--placement=collocated", "--learner.ranks=2", f"--learner.steps={_STEPS}", *same, *holding.ARGUMENTS),
        env=holding.environment(tmp_path, after=1),
    )
    run.wait_step(1)
    yielded = rollmesh("yield", str(run.folder), "--hold", "100000")
    assert yielded.returncode == 0, yielded.stderr
    # All that the gate allows is ready, and the learner, asked to, takes no turn once its last one is over.
    holding.release(tmp_path)
    wait_until(run, lambda: gathered(rollmesh, run) == (1 + _STALENESS) * _GROUPS)
    # The generator's own word comes with its next heartbeat; until then the turn is that of generators that start.
    wait_until(run, lambda: _generates(rollmesh, run))
    trained = len(run.metric("tokens_per_second"))
    for _ in range(_LOOKS):
        assert _generates(rollmesh, run)
    assert len(run.metric("tokens_per_second")) == trained < _STEPS
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
    assert max(int(age) for age in summary["staleness"]) <= _STALENESS
    assert not (run.folder / REST_NAME).exists()

    if not continues:
        return
    continued = start_mesh(f"--learner.steps={_STEPS + 1}", *same)
    assert continued.finish() == 0, continued.tail()
    audit(continued)
    assert continued.summary()["steps"] == _STEPS + 1


def _generates(rollmesh: Command, run: MeshRun) -> bool:
    return bool(re.search(r"turn .*generating", rollmesh("status", str(run.folder)).stdout))


def gathered(rollmesh: Command, run: MeshRun) -> int:
    """Groups that a batch can be made of."""
    told = json.loads(rollmesh("ledger", str(run.folder), "--json").stdout)
    counts = told["tables"]["train"]["recounted"]
    return int(counts["ready"] + counts["leased"])


def wait_until(run: MeshRun, reached: Callable[[], bool]) -> None:
    """Asks until it is so, while the run is there."""
    while not reached():
        assert run.process.poll() is None, run.tail()
        time.sleep(0.2)  # another process's state: there is nothing to wait on
