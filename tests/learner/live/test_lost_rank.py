"""A learner of two ranks, one of which is stopped: the run ends by its name and continues from its checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME, list_checkpoints
from rollmesh.mesh.errors import RankLostError
from rollmesh.mesh.runtime.threads import thread_environment
from tests.learner.live.test_runs import assert_nothing_twice, records, wait_for_line
from tests.learner.live.tiny import make_config, mesh_of, run_learner
from tests.repository import REPOSITORY


@pytest.mark.slow
def test_a_rank_that_is_stopped_ends_the_learner_by_name_and_the_next_one_continues(tmp_path: Path) -> None:
    changes = {"checkpoint.every_s": None, "data.eval": None}
    two = {"learner.ranks": 2, "learner.steps": 1000, "checkpoint.every_steps": 1, "learner.distributed.timeout_s": 5.0}
    config = make_config(tmp_path, {**changes, **two})
    (tmp_path / "config.json").write_text(config.model_dump_json(), encoding="utf-8")
    with mesh_of(config) as mesh:
        command = [sys.executable, "-m", "rollmesh.cli", "learner", str(tmp_path / "config.json"), "--mesh", mesh]
        environment = {**os.environ, **thread_environment(1), "PYTHONPATH": str(REPOSITORY)}
        with (tmp_path / "learner.log").open("w") as log:
            learner = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            wait_for_line(config.run.folder / "consumption.jsonl", lambda line: line["train_version"] == 3, 180.0)
            ranks = {int(child.environ()["RANK"]): child for child in psutil.Process(learner.pid).children()}
            ranks[1].suspend()
            assert learner.wait(120) == RankLostError.exit_code
        finally:
            learner.send_signal(signal.SIGKILL)
            learner.wait()
        said = (tmp_path / "learner.log").read_text()
        assert said.count(f"rank 1 (process {ranks[1].pid} on ") == 1, said[-3000:]
        saved = max(version.version for version, _ in list_checkpoints(config.run.folder / CHECKPOINTS_NAME))
        assert saved >= 1, "the newest may still have been written"
        # One rank continues what two have begun.
        last = make_config(tmp_path, {**changes, "learner.steps": saved + 2})
        assert run_learner(last, mesh, takeover=True) == 0
    steps = [record["step"] for record in records(config) if "tokens_per_second" in record]
    assert steps[-2:] == [saved + 1, saved + 2]
    assert_nothing_twice(config)
