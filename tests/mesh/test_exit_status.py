"""The exit status that a service leaves for its launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh import exit_status


def test_the_process_that_fails_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "learner.exit"
    monkeypatch.setenv(exit_status.VARIABLE, str(path))
    exit_status.leave(0)
    assert exit_status.find(path) == 0
    exit_status.leave(5)
    exit_status.leave(0)
    assert exit_status.find(path) == 5


def test_a_full_disk_does_not_change_the_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(exit_status.VARIABLE, "/dev/full")
    exit_status.leave(3)
    assert "cannot write the exit status 3" in caplog.text
