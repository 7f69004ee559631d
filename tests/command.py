"""The `rollmesh` command in the tests' own process: the same entry point without the time that imports take."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rollmesh.doctor.findings import Diagnosis

# The shortest watch that users get, and that of a mesh in which nothing moves.
_LEAST_WATCH_S, _MOMENT_S = 5.0, 0.1
Command = Callable[..., subprocess.CompletedProcess[str]]


def in_this_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Takes the command's arguments; gives its status and what it wrote."""
    # This process does not end with the command.
    monkeypatch.setattr("rollmesh.cli.app.bound_exit", lambda *_: None)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        from rollmesh.cli import main

        monkeypatch.setattr(sys, "argv", ["rollmesh", *arguments])
        root = logging.getLogger()
        umask, handlers, level = os.umask(0o022), root.handlers[:], root.level
        try:
            with pytest.raises(SystemExit) as end:
                main()
        finally:
            os.umask(umask)
            # A command's log goes to a captured stream, which is closed with its test.
            root.handlers[:] = handlers
            root.setLevel(level)
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(list(arguments), int(end.value.code or 0), out, err)

    return run


def briefly(diagnose: Callable[..., Diagnosis]) -> Callable[..., Diagnosis]:
    """`diagnose_mesh` that watches the mesh for a moment, whatever the command says."""

    def watch(*arguments: Any, watch_s: float) -> Diagnosis:
        assert watch_s >= _LEAST_WATCH_S
        return diagnose(*arguments, watch_s=_MOMENT_S)

    return watch
