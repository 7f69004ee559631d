"""What a trial says reaches the launcher, whatever users' code prints or raises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mesh.config import Config, load_config
from mesh.errors import RewardError, RollmeshError
from rollmesh.launcher.trial import Trial


def config(*overrides: str) -> Config:
    return load_config({"model": {"path": "m"}, "data": {"train": "t.jsonl"}}, overrides)


def test_what_users_code_prints_at_its_end_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import atexit\natexit.register(print, 3)\n")
    with pytest.raises(RewardError, match="absent"):
        Trial("reward", config(f"reward.functions=[{tmp_path}/own.py:absent]"), None, 60).result()


@pytest.mark.parametrize("exit_code", [1, 4, 77])
def test_an_error_of_any_kind_is_told(exit_code: int, tmp_path: Path) -> None:
    wrong = json.dumps({"wrong": {"exit_code": exit_code, "message": "too small", "hint": "raise it"}})
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ncat > /dev/null\necho 'rollmesh trial: {wrong}'\n")
    python.chmod(0o755)
    with pytest.raises(RollmeshError, match="too small") as refused:
        Trial("learner", config(), python, 60).result()
    assert refused.value.hint == "raise it"


def test_one_that_ends_without_a_word_is_left_to_the_service(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\ncat > /dev/null\necho 3\n")
    python.chmod(0o755)
    assert Trial("learner", config(), python, 60).result() == []
