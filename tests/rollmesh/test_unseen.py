"""A run whose terminal or pipe is full, closed or gone is the same run."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from rollmesh.launcher.logs import tail
from rollmesh.launcher.service_process import log_file, ready_file
from tests import fork_server
from tests.repository import REPOSITORY
from tests.signals import handled

FAKE_RUN = "tests.rollmesh.fake_run"
DEADLINE_S = 240.0
UP = "learner is up"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Run:
    """A launcher as a process, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        self._process: fork_server.RunningCommand | subprocess.Popen[bytes] | None = None

    def start(
        self, *learner: str, stdout: int, ignored: Sequence[signal.Signals] = (), leads_session: bool = False
    ) -> None:
        """Starts it, forked; it ignores signals, or leads the session of the terminal that is its stdout."""
        numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
        with ExitStack() as handling:
            for number in numbers:
                handling.enter_context(handled(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL))
            arguments = ["--leads-session"] * leads_session + [str(self.folder), *learner]
            self._process = fork_server.popen(arguments, module=FAKE_RUN, stdout=stdout, stderr=stdout)

    def execute(self, *learner: str, before: Callable[[], object]) -> None:
        """Starts it as a program of its own, whose interpreter begins as `before` makes it."""
        with handled(signal.SIGINT, signal.default_int_handler):
            self._process = subprocess.Popen(
                [sys.executable, "-m", FAKE_RUN, str(self.folder), *learner],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=REPOSITORY,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
                start_new_session=True,
                preexec_fn=before,
            )

    @property
    def log(self) -> str:
        return "\n".join(tail(log_file(self.folder, "launcher"), lines=100))

    def until_up(self) -> None:
        until(lambda: UP in self.log)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def end(self) -> int:
        assert self._process is not None
        return self._process.wait(DEADLINE_S)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def ended(self) -> Any:
        return json.loads((self.folder / "summary.json").read_text())["ended"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path)
    yield run
    run.kill()


@pytest.fixture
def full_pipe() -> Iterator[int]:
    """A pipe into which nothing more fits; no one reads it."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    yield writer
    os.close(reader)
    os.close(writer)


def test_a_pipe_that_no_one_reads_holds_up_nothing(run: Run, full_pipe: int) -> None:
    run.start(stdout=full_pipe)
    run.until_up()
    run.signal(signal.SIGTERM)
    assert run.end() == 130
    assert run.ended == "interrupted"


def test_a_pipe_that_is_closed_ends_nothing(run: Run) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    run.start("--die-after-ready", "0", stdout=writer)
    os.close(writer)
    assert run.end() == 0
    assert run.ended == "finished"
    assert run.log.count("the view cannot be shown (Broken pipe); the run continues without it") == 1
    assert (run.folder / "report.html").is_file()


def test_a_run_whose_terminal_is_gone_ends_in_order(run: Run) -> None:
    """The kernel tells the leader of the terminal's session, a shell tells it again: that does not hurry the end."""
    terminal, stdout = pty.openpty()
    run.start("--drained", str(run.folder / "drained"), stdout=stdout, leads_session=True)
    os.close(stdout)
    until(lambda: ready_file(run.folder, "learner").exists())
    run.until_up()
    os.close(terminal)
    run.signal(signal.SIGHUP)
    until(lambda: "draining" in run.log)
    run.signal(signal.SIGHUP)
    assert run.end() == 129
    assert run.ended == "interrupted"
    assert "killing" not in run.log
    assert (run.folder / "drained").exists()


@pytest.mark.exhaustive
def test_a_terminal_that_is_held_up_holds_up_nothing(run: Run) -> None:
    """The live table."""
    terminal, stdout = pty.openpty()
    termios.tcflow(stdout, termios.TCOOFF)
    run.start(stdout=stdout)
    run.until_up()
    run.signal(signal.SIGINT)
    assert run.end() == 130
    assert run.ended == "interrupted"
    os.close(stdout)
    os.close(terminal)


def test_signals_that_the_caller_ignores_stay_ignored(run: Run) -> None:
    """Under nohup, and in the background of a script."""
    ignored = (signal.SIGHUP, signal.SIGINT)
    run.start(stdout=subprocess.DEVNULL, ignored=ignored)
    run.until_up()
    for number in (*ignored, signal.SIGTERM):
        run.signal(number)
    assert run.end() == 130
    assert "killing" not in run.log, "SIGTERM was the first to be heard"


@pytest.mark.exhaustive
def test_a_run_without_stdout_is_a_run(run: Run) -> None:
    run.execute("--die-after-ready", "0", before=lambda: os.close(1))
    assert run.end() == 0
    assert run.ended == "finished"


def test_an_error_that_no_one_reads_has_its_exit_code(full_pipe: int, tmp_path: Path) -> None:
    with fork_server.popen(["run", str(tmp_path / "none.yaml")], stdout=full_pipe, stderr=full_pipe) as command:
        assert command.wait(DEADLINE_S) == 2
