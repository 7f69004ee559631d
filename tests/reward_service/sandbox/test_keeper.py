"""The keeper: a run that cannot begin leaves no descriptor open."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest

from rollmesh.reward_service.sandbox import keeper


class NoProcesses:
    """A zygote that cannot fork."""

    limits = {"output": 10}

    def begin(self, *_: Any, **__: Any) -> int:
        raise OSError("no more processes")


def full(*_: Any) -> None:
    raise OSError("no more memory")


@pytest.mark.parametrize("broken", ["begin", "pipe", "fcntl"])
def test_a_run_that_cannot_begin_leaves_nothing_open(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    processes: Any = NoProcesses()
    if broken != "begin":
        monkeypatch.setattr(keeper.os if broken == "pipe" else keeper.fcntl, broken, full)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        before = os.listdir("/proc/self/fd")
        with pytest.raises(OSError, match="no more"):
            keeper._Run(ours, {"wall_s": 1.0, "last": True}, b"1", processes)
        assert os.listdir("/proc/self/fd") == before
