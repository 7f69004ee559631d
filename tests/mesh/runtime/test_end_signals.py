"""Signals that end a process; those that the caller ignores stay ignored."""

from __future__ import annotations

import contextlib
import signal

import pytest

from rollmesh.mesh.runtime.end_signals import end_signals
from tests.repository import REPOSITORY
from tests.signals import handled

TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@pytest.mark.parametrize(
    ("ignored", "hangup", "heard"),
    [
        ([], False, [TERM, INT]),
        ([], True, [TERM, INT, HUP]),
        ([INT], True, [TERM, HUP]),
        ([HUP], True, [TERM, INT]),
        ([HUP, INT, TERM], True, [TERM]),
    ],
)
def test_an_ignored_signal_asks_for_nothing_but_sigterm_always_does(
    ignored: list[signal.Signals], hangup: bool, heard: list[signal.Signals]
) -> None:
    with contextlib.ExitStack() as stack:
        for number in (TERM, INT, HUP):
            # Whatever else handles it.
            stack.enter_context(handled(number, signal.SIG_IGN if number in ignored else signal.default_int_handler))
        assert end_signals(hangup=hangup) == heard


def test_no_program_handles_sigint_unasked() -> None:
    """All ask `end_signals`; what ignores it, or names it for other reasons, is listed."""
    packages = ("buffer", "generators", "learner", "mesh", "reward_service", "rollmesh")
    files = [path for package in packages for path in (REPOSITORY / package).rglob("*.py")]
    named = {path.relative_to(REPOSITORY).as_posix() for path in files if "signal.SIGINT" in path.read_text()}
    others = {
        "generators/engines/sglang/server_watchdog.py",  # ignores it
        "mesh/runtime/ranks.py",  # holds it back for a moment
        "mesh/runtime/fork_server/server.py",  # makes a forked program begin and end as an interpreter does
        "mesh/user_code.py",  # asks who handles it
        "reward_service/sandbox/zygote.py",  # ignores it
        "rollmesh/launcher/local.py",  # its number is in an exit code
        "rollmesh/trainers.py",  # an exit code; passes a Ctrl-C of its own on
    }
    assert named == {"mesh/runtime/end_signals.py", *others}
