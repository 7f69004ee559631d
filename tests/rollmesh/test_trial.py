"""The message of a trial reaches the launcher, whatever users' code prints or raises."""

from __future__ import annotations

import json
import os
import select
from contextlib import closing
from pathlib import Path

import pytest

from rollmesh.launcher.preflight.trial import StartTrial
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.errors import RewardError, RollmeshError


def config(*overrides: str) -> Config:
    return load_config({"model": {"path": "m"}, "data": {"train": "t.jsonl"}}, overrides)


def result_of(what: str, of: Config, python: Path | None) -> list[str]:
    with closing(StartTrial(what, of, python, 60)) as trial:
        return trial.result()


def test_what_users_code_prints_at_its_end_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import atexit\natexit.register(print, 3)\n")
    with pytest.raises(RewardError, match="absent"):
        result_of("reward", config(f"reward.functions=[{tmp_path}/own.py:absent]"), None)


@pytest.mark.parametrize("exit_code", [1, 4, 77])
def test_an_error_of_any_kind_is_told(exit_code: int, tmp_path: Path) -> None:
    wrong = json.dumps({"wrong": {"exit_code": exit_code, "message": "too small", "hint": "raise it"}})
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat > /dev/null\necho 'rollmesh trial: {wrong}'\n")
    python.chmod(0o755)
    with pytest.raises(RollmeshError, match="too small") as refused:
        result_of("learner", config(), python)
    assert refused.value.hint == "raise it"


def test_one_that_ends_without_a_word_is_left_to_the_service(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\ncat > /dev/null\necho 3\n")
    python.chmod(0o755)
    assert result_of("learner", config(), python) == []


def test_what_users_code_has_started_is_not_waited_for_and_does_not_stay(tmp_path: Path) -> None:
    """Its end is seen by the end of a pipe that it alone holds open."""
    os.mkfifo(tmp_path / "alive")
    alive = os.open(tmp_path / "alive", os.O_RDONLY | os.O_NONBLOCK)
    python = tmp_path / "python"
    said = json.dumps({"notices": ["a note"]})
    python.write_text(f"#!/bin/sh\nexec 3> {tmp_path}/alive\nsleep 60 &\nexec 3>&-\necho 'rollmesh trial: {said}'\n")
    python.chmod(0o755)
    trial = StartTrial("reward", config(), python, 30)
    assert trial.result() == ["a note"]
    trial.close()
    os.set_blocking(alive, True)
    assert select.select([alive], [], [], 30)[0]
    assert os.read(alive, 1) == b""
    os.close(alive)
