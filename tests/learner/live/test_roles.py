"""Whole runs of algorithms that need more than the actor: a critic, and what a run cannot provide."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from benchmarks.learner.tiny_models import save_model
from rollmesh.mesh.config import Config
from rollmesh.mesh.errors import ConfigError, DataError
from tests.learner.live.test_runs import assert_nothing_twice, ledger, records, summary, wait_for_line
from tests.learner.live.tiny import make_config, meanwhile, mesh_of, run_learner


def steps_of(config: Config) -> list[dict[str, Any]]:
    return [record for record in records(config) if "tokens_per_second" in record]


def algorithm_state(config: Config) -> dict[str, Any]:
    """The algorithm's state in the newest checkpoint."""
    newest = max((config.run.folder / "checkpoints").iterdir())
    state: dict[str, Any] = json.loads((newest / "state.json").read_text())["extra"]["algorithm"]
    return state


def test_ppo_warms_its_critic_up_and_resumes_with_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # A critic of another architecture, whose sequences cannot be packed: all roles' micro-batches are then rows.
    critic = save_model(tmp_path / "critic", "bloom")
    changes = {
        "learner.roles": {"critic": {"path": str(critic)}},
        "algorithm.name": "ppo",
        "algorithm.critic_warmup": 2,
        "algorithm.kl": {"where": "reward", "coefficient": 0.1, "target": 1e-6, "horizon": 100},
        "learner.steps": 8,
        "checkpoint.every_s": None,
        "data.eval": None,
    }
    config = make_config(tmp_path, changes)

    def end_it() -> None:
        wait_for_line(config.run.folder / "consumption.jsonl", lambda line: line["train_version"] == 3)
        os.kill(os.getpid(), signal.SIGTERM)

    with mesh_of(config) as mesh:
        with meanwhile(end_it):
            assert run_learner(config, mesh) == 0
        stopped = summary(config)["version"]
        before = algorithm_state(config)
        # Another algorithm cannot continue with this state, and says so.
        assert run_learner(make_config(tmp_path, {**changes, "algorithm.name": "vapo"}), mesh) == DataError.exit_code
        assert run_learner(config, mesh) == 0
        assert ledger(mesh).recounted.trained == 8 * 4
    steps = steps_of(config)
    assert [record["step"] for record in steps] == list(range(1, 9))
    assert ["actor/loss" in record for record in steps] == [False] * 2 + [True] * 6
    assert all("critic/vf_loss" in record for record in steps)
    # The coefficient that the adaptive controller had reached at the stop is where the resumed learner continues.
    assert steps[stopped]["actor/kl_coef"] == pytest.approx(before["state"]["kl_coefficient"])
    assert before["state"]["kl_coefficient"] != 0.1
    assert_nothing_twice(config)
    assert "(bloom): every sequence is computed in a row of its own: it" in capfd.readouterr().err


def test_what_the_run_cannot_provide_is_refused_at_start(tmp_path: Path, capfd: Any) -> None:
    config = make_config(tmp_path, {"algorithm.name": "rloo", "rollout.n": 1, "buffer.min_members": 1})
    assert run_learner(config, "127.0.0.1:9") == ConfigError.exit_code
    assert "needs at least 2, but rollout.n is 1" in capfd.readouterr().err
