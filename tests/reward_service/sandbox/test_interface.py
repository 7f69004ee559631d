"""Jobs that are refused, ends by what a keeper has seen, and messages."""

from __future__ import annotations

import socket

import pytest

from rollmesh.reward_service.sandbox.interface import Job, Limits, ended
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
    ("cause", "exit_code", "out_of_memory", "cpu_s", "expected"),
    [
        ("", 0, False, 0.1, ("exit", 0)),
        ("", 3, False, 0.1, ("exit", 3)),
        ("", 1, True, 0.1, ("memory", 1)),
        ("", 0, True, 0.1, ("exit", 0)),
        ("", -31, False, 0.1, ("denied", 31)),
        ("", -9, False, 4.0, ("cpu", 9)),
        ("", -9, False, 1.0, ("signal", 9)),
        ("cpu", -9, False, 3.4, ("cpu", 9)),
        ("", -11, False, 4.0, ("signal", 11)),
        ("wall", -9, False, 4.0, ("wall", 9)),
        ("output", 0, False, 0.1, ("output", 0)),
    ],
)
def test_ends(cause: str, exit_code: int, out_of_memory: bool, cpu_s: float, expected: tuple[str, int]) -> None:
    seen = {"cause": cause, "exit_code": exit_code, "out_of_memory": out_of_memory, "cpu_s": cpu_s}
    assert ended(Limits(), **seen) == expected


def test_messages_hold_any_bytes() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(pack({"a": "é\n", "b": [1]}, [b"\0\xff", b"", b"x" * 1000]) + pack({}))
        assert receive(theirs) == ({"a": "é\n", "b": [1]}, [b"\0\xff", b"", b"x" * 1000])
        assert receive(theirs) == ({}, [])
        ours.sendall(pack({"a": 1}, [b"xyz"])[:-1])
        ours.close()
        assert receive(theirs) is None
