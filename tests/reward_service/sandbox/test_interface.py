"""Jobs that are refused, ends by what a keeper has seen, and messages."""

from __future__ import annotations

import socket

import pytest

from rollmesh.reward_service.sandbox.interface import Cause, Job, Limits, ended
from rollmesh.reward_service.sandbox.messages import pack, receive


@pytest.mark.parametrize(
    ("files", "argv"),
    [
        ({"main.py": b""}, []),
        ({"main.py": b""}, ["other.py"]),
        ({"main.py": b""}, ["main.py", "a\0b"]),
        ({"main.py": b"", "/etc/x": b""}, ["main.py"]),
        ({"main.py": b"", "../x": b""}, ["main.py"]),
        ({"main.py": b"", "": b""}, ["main.py"]),
    ],
)
def test_jobs_stay_in_their_folder(files: dict[str, bytes], argv: list[str]) -> None:
    with pytest.raises(ValueError, match=r"job|path|files"):
        Job("python", files, argv)
    with pytest.raises(ValueError, match="path"):
        Job("native", {}, ["x"], outputs=["../x"])


@pytest.mark.parametrize("wrong", [{"cpu_s": 0}, {"wall_s": -1}, {"memory": 0}, {"threads": -1}, {"files": 3}])
def test_limits_leave_room(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"time|positive|files"):
        Limits(**wrong)


@pytest.mark.parametrize(
    ("cause", "exit_code", "out_of_memory", "expected"),
    [
        ("", 0, False, ("exit", 0)),
        ("", 3, False, ("exit", 3)),
        ("", 1, True, ("memory", 1)),
        ("", 0, True, ("exit", 0)),
        ("", -31, False, ("denied", 31)),
        ("", -9, False, ("signal", 9)),
        ("", -11, False, ("signal", 11)),
        ("cpu", -9, False, ("cpu", 9)),
        ("wall", -9, False, ("wall", 9)),
        ("output", 0, False, ("output", 0)),
        ("memory", -9, False, ("memory", 9)),
        ("memory", 3, False, ("memory", 0)),
    ],
)
def test_ends(cause: Cause, exit_code: int, out_of_memory: bool, expected: tuple[str, int]) -> None:
    assert ended(cause, exit_code, out_of_memory=out_of_memory) == expected


def test_messages_hold_any_bytes() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(pack({"a": "é\n", "b": [1]}, [b"\0\xff", b"", b"x" * 1000]) + pack({}))
        assert receive(theirs) == ({"a": "é\n", "b": [1]}, [b"\0\xff", b"", b"x" * 1000])
        assert receive(theirs) == ({}, [])
        ours.sendall(pack({"a": 1}, [b"xyz"])[:-1])
        ours.close()
        assert receive(theirs) is None
