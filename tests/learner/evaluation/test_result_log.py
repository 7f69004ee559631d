"""The files of evaluation rounds: whole, by version, bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

import rollmesh.learner.evaluation.result_log as module
from rollmesh.learner.evaluation.result_log import MAX_TEXT, ResultLog, shorten_text


def test_results_come_back_by_version_and_rows_of_old_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILES_WITH_ROWS", 2)
    log = ResultLog(tmp_path)
    assert log.results() == []
    for incarnation, version in ((1, 0), (1, 8), (2, 4), (2, 8)):
        log.write({"incarnation": incarnation, "version": version, "reward": version / 8}, [{"row": version}])
    log.write({"incarnation": 2, "version": 8, "reward": 0.5}, [{"row": 8}, {"row": 9}])
    found = [(result["incarnation"], result["version"], result["reward"]) for result in log.results()]
    assert found == [(1, 0, 0.0), (1, 8, 1.0), (2, 4, 0.5), (2, 8, 0.5)], "a later round at a version replaces it"
    assert [len(log.rows(*name)) for name in ((1, 0), (1, 8), (2, 4), (2, 8), (9, 9))] == [0, 0, 1, 2, 0]
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\r", "\n"])
def test_ends_of_lines_within_a_response_come_back(tmp_path: Path, end: str) -> None:
    log, rows = ResultLog(tmp_path), [{"row": 0, "text": f"a{end}b"}, {"row": 1, "text": end}]
    log.write({"incarnation": 1, "version": 0, "reward": 0.0}, rows)
    assert log.rows(1, 0) == rows


def test_long_responses_keep_their_end() -> None:
    assert shorten_text("x" * MAX_TEXT) == "x" * MAX_TEXT
    kept = shorten_text("a" * MAX_TEXT + "the end")
    assert kept.endswith("the end")
    assert len(kept) == MAX_TEXT + 4
