"""The live view of a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rollmesh.launcher.console.view import LiveView, open_view, status_table
from rollmesh.launcher.mesh_client import Snapshot


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


def test_tokens_of_generators_that_have_left_stay_in_the_total() -> None:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(status_table(Snapshot(generated_tokens=1200.0)))
    assert "0 generated just now (1200 tokens so far)" in capture.get()
