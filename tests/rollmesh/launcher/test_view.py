"""The live view of a terminal."""

from __future__ import annotations

import io

import pytest

from rollmesh.launcher.console.view import LiveView, open_view


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_whole_summary_is_there_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "24")
    view = open_view(1)
    assert isinstance(view, LiveView)
    for number in range(20):
        view.event(f"line {number} of the summary")
    view.close()
    last = terminal.getvalue().rpartition("line 0 of the summary")[2]
    assert [f"line {number} of" in last for number in range(1, 20)] == [True] * 19
