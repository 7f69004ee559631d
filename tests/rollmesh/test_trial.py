"""The message of a trial reaches the launcher, whatever users' code prints or raises."""

from __future__ import annotations

import json
import os
import select
from contextlib import closing
from pathlib import Path

import pytest

from rollmesh.launcher.preflight.checks import check_code
from rollmesh.launcher.preflight.trial import StartTrial
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.errors import ConfigError, RewardError, RollmeshError


def config(*overrides: str) -> Config:
    return load_config({"model": {"path": "m"}, "data": {"train": "t.jsonl"}}, overrides)


def python_that(tmp_path: Path, *lines: str) -> Path:
    """An interpreter that reads the configuration from the launcher, and then does this."""
    python = tmp_path / "python"
    python.write_text("\n".join(("#!/bin/sh", "read -r config", *lines, "")))
    python.chmod(0o755)
    return python


def answers(**answer: object) -> str:
    return f"echo '{json.dumps(answer)}' >&0"


def start(
    what: str = "learner", of: Config | None = None, python: Path | None = None, within_s: float = 600
) -> StartTrial:
    return StartTrial(what, of or config(), python, {}, within_s)


def test_a_folder_in_which_no_learner_could_rest_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "blocked").touch()
    on_cpu = ("placement=collocated", "learner.device=cpu", "rollout.device=cpu")
    rests = config(*on_cpu, f"placement.rest_dir={tmp_path}/blocked/x")
    with pytest.raises(ConfigError, match=r"placement\.rest_dir"):
        check_code(rests)


def test_what_users_code_prints_at_its_end_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import atexit\natexit.register(print, 3)\nprint('{}')\n")
    with (
        closing(start("reward", config(f"reward.functions=[{tmp_path}/own.py:absent]"))) as trial,
        pytest.raises(RewardError, match="absent"),
    ):
        trial.result()


@pytest.mark.parametrize("exit_code", [1, 4, 77])
def test_an_error_of_any_kind_is_told(exit_code: int, tmp_path: Path) -> None:
    wrong = {"exit_code": exit_code, "message": "too small", "hint": "raise it"}
    with (
        closing(start(python=python_that(tmp_path, answers(wrong=wrong)))) as trial,
        pytest.raises(RollmeshError, match="too small") as refused,
    ):
        trial.result()
    assert refused.value.hint == "raise it"


def test_one_that_is_slow_is_left_to_the_service(tmp_path: Path) -> None:
    with closing(start(python=python_that(tmp_path, "sleep 60"), within_s=0.2)) as trial:
        assert trial.result() == []


@pytest.mark.parametrize(
    ("ends", "how", "hint"),
    [
        ("echo boom >&2; exit 3", "exited with status 3", "boom"),
        ("exit 0", "exited with status 0", ""),
        ("kill -9 $$", "killed by signal SIGKILL", ""),
    ],
)
def test_one_that_ends_without_an_answer_has_failed(ends: str, how: str, hint: str, tmp_path: Path) -> None:
    with (
        closing(start(python=python_that(tmp_path, ends))) as trial,
        pytest.raises(RollmeshError, match=f"the trial of the learner's code gave no answer: {how}") as refused,
    ):
        trial.result()
    assert hint in str(refused.value)


def test_what_users_code_has_started_is_not_waited_for_and_does_not_stay(tmp_path: Path) -> None:
    """Its end is seen by the end of a pipe that it alone holds open."""
    os.mkfifo(tmp_path / "alive")
    alive = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    starts = (f"exec 3> {tmp_path}/alive", "sleep 60 &", "exec 3>&-")
    trial = start("reward", python=python_that(tmp_path, *starts, answers(notices=["a note"])))
    assert trial.result() == ["a note"]
    trial.close()
    os.set_blocking(alive, True)
    assert select.select([alive], [], [], 600)[0]
    assert os.read(alive, 1) == b""
    os.close(alive)
