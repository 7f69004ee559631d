"""Means of confinement one by one: each stops its part where the others are not in force."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rollmesh.reward_service.sandbox import landlock, linux
from rollmesh.reward_service.sandbox.landlock import SCOPES
from tests.repository import REPOSITORY

_ATTEMPTS = """
import errno, os, socket, sys
path, port, name, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
from rollmesh.reward_service.sandbox import landlock, linux, namespaces
def connect(family, address):
    with socket.socket(family) as client:
        client.connect(address)
def attempt_all(other):
    attempts = (
        lambda: open(path),
        lambda: open(os.path.dirname(path) + "/new", "w"),
        lambda: connect(socket.AF_INET, ("127.0.0.1", port)),
        lambda: connect(socket.AF_UNIX, b"\\0" + bytes.fromhex(name)),
        lambda: os.kill(other, 0),
    )
    for attempt in attempts:
        try:
            attempt()
            print("ESCAPED", flush=True)
        except OSError as error:
            print(errno.errorcode[error.errno], flush=True)
"""
_LANDLOCK = """
rules = landlock.ruleset(landlock.version(), [("/usr", landlock.READ)])
linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
landlock.restrict_self(rules)
attempt_all(os.getppid())
"""
_NAMESPACES = """
try:
    namespaces.enter()
except OSError as error:
    sys.exit(f"SKIP {error}")
owner = os.getppid()
if os.fork():
    os.wait()
    sys.exit()
try:
    namespaces.build_root(folder, ["/usr"], "/box")
except OSError as error:
    print("SKIP", error, file=sys.stderr, flush=True)
    os._exit(0)
attempt_all(owner)
os._exit(0)
"""


def _attempts(means: str, outside: Path) -> list[str]:
    """The results of attempts to read, to write, to connect twice, and to signal."""
    folder = outside / "root"
    folder.mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind("")
        abstract.listen()
        where = [str(outside / "secret"), str(listener.getsockname()[1]), abstract.getsockname()[1:].hex(), str(folder)]
        ended = subprocess.run(
            [sys.executable, "-c", _ATTEMPTS + means, *where],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
    if ended.stderr.startswith("SKIP"):
        pytest.skip(ended.stderr)
    assert not ended.stderr
    return ended.stdout.split()


@pytest.mark.skipif(linux.MACHINE not in linux.AUDIT_ARCHITECTURES, reason="not for this machine")
def test_landlock_alone(outside: Path) -> None:
    if landlock.version() < SCOPES:
        pytest.skip(f"Landlock {SCOPES}: this kernel has {landlock.version()}")
    assert _attempts(_LANDLOCK, outside) == ["EACCES", "EACCES", "EACCES", "EPERM", "EPERM"]


@pytest.mark.skipif(linux.MACHINE not in linux.AUDIT_ARCHITECTURES, reason="not for this machine")
def test_namespaces_alone(outside: Path) -> None:
    assert _attempts(_NAMESPACES, outside) == ["ENOENT", "ENOENT", "ENETUNREACH", "ECONNREFUSED", "ESRCH"]
