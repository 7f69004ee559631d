"""A learner of two ranks loses one of them: it ends, and another engine on one rank continues from its checkpoint."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollmesh.learner.checkpoint.names import CHECKPOINTS_NAME, list_checkpoints
from rollmesh.mesh.errors import RankLostError
from tests.learner.live.test_runs import assert_nothing_twice, records, wait_for_line
from tests.learner.live.tiny import learner_process, make_config, mesh_of, run_learner

_MEGATRON = {"learner.engine": "megatron"}
# A rank is silent after four times this; the others wait for longer for one that comes up later.
_IMPATIENT = {"learner.distributed.timeout_s": 60.0, "resources.frozen_after_s": 3.0}
_STAGES = _MEGATRON | {"learner.parallel.pp": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begun", "lost", "blow", "code", "continued"),
    [
        pytest.param(_IMPATIENT, 1, signal.SIGSTOP, RankLostError.exit_code, _MEGATRON, id="fsdp2, rank 1 is stopped"),
        # A killed rank and the others: tests/mesh/runtime/test_ranks.py proves it without a learner.
        pytest.param(
            _STAGES,
            0,
            signal.SIGKILL,
            -signal.SIGKILL,
            {},
            id="stages of megatron, rank 0 is killed",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_a_rank_that_is_lost_ends_the_learner_and_the_next_one_continues(
    tmp_path: Path, begun: dict[str, Any], lost: int, blow: signal.Signals, code: int, continued: dict[str, Any]
) -> None:
    changes = {"checkpoint.every_s": None, "data.eval": None}
    two = {"learner.ranks": 2, "learner.steps": 1000, "checkpoint.every_steps": 1}
    config = make_config(tmp_path, {**changes, **two, **begun}, layers=2)
    with mesh_of(config) as mesh:
        with learner_process(config, mesh, tmp_path) as learner:
            wait_for_line(config.run.folder / "consumption.jsonl", lambda line: line["train_version"] == 3)
            titles = {child: " ".join(child.cmdline()) for child in psutil.Process(learner.pid).children()}
            ranks = {int(re.findall(r"\(rank (\d+)\)", title)[0]): child for child, title in titles.items()}
            ranks[lost].send_signal(blow)
            assert learner.wait() == code
        assert not any(rank.is_running() for rank in ranks.values())
        said = (tmp_path / "learner.log").read_text()
        if code == RankLostError.exit_code:
            assert said.count(f"rank {lost} (process {ranks[lost].pid} on ") == 1, said[-3000:]
        saved = max(version.version for version, _ in list_checkpoints(config.run.folder / CHECKPOINTS_NAME))
        assert saved >= 1, "the newest may still have been written"
        last = make_config(tmp_path, {**changes, **continued, "learner.steps": saved + 2}, layers=2)
        assert run_learner(last, mesh, takeover=True) == 0
    steps = [record["step"] for record in records(config) if "tokens_per_second" in record]
    assert steps[-2:] == [saved + 1, saved + 2]
    assert_nothing_twice(config)
