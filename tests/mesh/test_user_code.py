"""Users' code by import path: whatever a module raises is an error that names it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollmesh.mesh.errors import DataError
from rollmesh.mesh.user_code import load_callable


def test_a_module_that_ends_the_process_on_import_is_named(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\ndef main(): ...\nsys.exit(0)\n")
    with pytest.raises(DataError, match=r"data.curriculum .*script.py:main: importing it raised SystemExit: 0"):
        load_callable(f"{tmp_path / 'script.py'}:main", "data.curriculum", DataError)


def test_a_file_that_a_module_misses_on_import_is_not_taken_for_the_module(tmp_path: Path) -> None:
    (tmp_path / "reads.py").write_text("open('/nowhere/words.txt')\ndef score(): ...\n")
    with pytest.raises(DataError, match=r"reads.py:score: importing it raised FileNotFoundError: .*words.txt"):
        load_callable(f"{tmp_path / 'reads.py'}:score", "reward.functions", DataError)
    with pytest.raises(DataError, match=r"no file .*absent.py"):
        load_callable(f"{tmp_path / 'absent.py'}:score", "reward.functions", DataError)


def test_a_file_may_import_what_lies_in_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That comes last: a file named like a module replaces none."""
    (tmp_path / "json.py").write_text("raise RuntimeError")
    (tmp_path / "lies_here.py").write_text("import json\ndef score(): ...\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "asks.py").write_text("from lies_here import score\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    assert callable(load_callable("folder/asks.py:score", "reward.functions", DataError))
    assert sys.path[-2:] == [str(tmp_path / "folder"), str(tmp_path)]
