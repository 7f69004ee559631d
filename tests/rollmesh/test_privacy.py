"""Runs are their user's alone: the folder, what commands write, and what is said where a folder is not."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from rollmesh.buffer.redis_backend.access import store_error
from rollmesh.cli import main
from rollmesh.launcher import folder as folders
from rollmesh.mesh.private_files import keep_private


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_run_folder_is_private_and_one_that_was_opened_is_said(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    umask = os.umask(0)
    try:
        with folders.locked(run):
            assert mode(run) == 0o700
            assert folders.permission_warnings(run) == []
    finally:
        os.umask(umask)
    run.chmod(0o750)
    with folders.locked(run):
        (told,) = folders.permission_warnings(run)
    assert f"`chmod 700 {run}`" in told
    assert mode(run) == 0o750, "its user may want to share it"


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        (["run", "cfg.yaml"], 0o600),
        (["--debug", "learner", "cfg.yaml"], 0o600),
        (["replay", "RUN"], 0o600),
        (["--debug", "export", "RUN", "OUT"], 0o644),
    ],
)
def test_what_a_command_writes_is_private_but_exports(
    arguments: list[str], written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    monkeypatch.setattr(sys, "argv", ["rollmesh", *arguments])
    # In the place of all commands, one that writes a file.
    monkeypatch.setattr("rollmesh.cli.app.app", lambda **_: file.touch())
    umask = os.umask(0o022)
    try:
        main()
    finally:
        os.umask(umask)
    assert mode(file) == written


def test_compiled_code_lies_where_no_one_else_can_put_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    # So that it is as it was afterwards.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    umask = os.umask(0)
    try:
        for given, used in ((None, tmp_path / ".cache" / "rollmesh" / "inductor"), ("chosen", Path("chosen"))):
            if given is None:
                monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
            else:
                monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given)
            keep_private()
            assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) == used
    finally:
        os.umask(umask)


def test_the_redis_of_another_user_is_named() -> None:
    error = store_error(PermissionError(13, "Permission denied"))
    assert "closed to this user" in error.message
    assert "only the user" in error.hint
