"""The reference servers of `examples/reward_server` in other languages pass the whole check, where their tools are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.repository import REPOSITORY

SERVERS = REPOSITORY / "examples" / "reward_server"
BUILT = REPOSITORY / ".make" / "reward-servers"
MOST_LINES = 80


def program(name: str) -> str:
    """Path of a program that this machine has; else the test is skipped."""
    found = shutil.which(name)
    return found or pytest.skip(f"no {name} here")


def built(name: str) -> Path:
    """A file that `make reward-servers` makes; else the test is skipped."""
    path = BUILT / name
    return path if path.exists() else pytest.skip(f"no {path}: make reward-servers")


def rust(folder: Path) -> Sequence[str]:
    command = [program("rustc"), "--edition", "2021", "-O", "-o", folder / "server", SERVERS / "rust" / "server.rs"]
    subprocess.run(command, check=True, timeout=240)
    return [str(folder / "server")]


def java(folder: Path) -> Sequence[str]:
    compiler, machine = program("javac"), program("java")
    subprocess.run([compiler, "-d", folder, *(SERVERS / "java").glob("*.java")], check=True, timeout=240)
    return [machine, "-cp", str(folder), "Server"]


def go(_folder: Path) -> Sequence[str]:
    return [str(built("go-server"))]


def node(_folder: Path) -> Sequence[str]:
    built("node/node_modules")
    return [program("node"), str(SERVERS / "node" / "server.js")]


@pytest.mark.parametrize(("scheme", "prepare"), [("http", rust), ("http", java), ("http", go), ("grpc", node)])
async def test_it_passes_the_check(
    scheme: str, prepare: Callable[[Path], Sequence[str]], checked: Any, tmp_path: Path
) -> None:
    environment = os.environ | {"NODE_PATH": str(BUILT / "node" / "node_modules")}
    process = subprocess.Popen([*prepare(tmp_path), "0"], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        listening = re.fullmatch(
            r"listening on (\S+)\n", process.stdout.readline()
        )  # the test's own time-out bounds it
        assert listening
        report = await checked(f"{scheme}://{listening[1]}")
    finally:
        process.kill()
        process.communicate()
    assert not report.findings
    assert report.server == f"{prepare.__name__}-example 1"


def test_they_are_short() -> None:
    # JSON takes a file of its own where the language has none.
    files = [path for path in SERVERS.glob("*/*") if path.stem.lower() == "server"]
    assert len(files) == 5
    assert not {path.name: n for path in files if (n := len(path.read_text().splitlines())) > MOST_LINES}
