"""The reference servers of `examples/reward_server` in other languages pass the whole check, where their tools are."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
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


def compiled(name: str, suffix: str, compile_into: Callable[[Path, Sequence[Path]], None]) -> Path:
    """The folder with what is compiled from a server's sources, once for each state of these."""
    sources = sorted((SERVERS / name).glob(f"*.{suffix}"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    folder = BUILT / f"{name}-{digest}"
    if not folder.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as made:
            compile_into(Path(made), sources)
            with contextlib.suppress(OSError):  # another process was faster
                os.rename(made, folder)
    return folder


def rust() -> Sequence[str]:
    def compile_into(folder: Path, _sources: Sequence[Path]) -> None:
        options = ("--edition", "2021", "-O", "-o", folder / "server")
        subprocess.run([program("rustc"), *options, SERVERS / "rust" / "server.rs"], check=True)

    return [str(compiled("rust", "rs", compile_into) / "server")]


def java() -> Sequence[str]:
    def compile_into(folder: Path, sources: Sequence[Path]) -> None:
        subprocess.run([program("javac"), "-d", folder, *sources], check=True)

    # It lives for seconds: the first of Java's compilers alone costs least.
    options = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto")
    return [program("java"), *options, "-cp", str(compiled("java", "java", compile_into)), "Server"]


def go() -> Sequence[str]:
    return [str(built("go-server"))]


def node() -> Sequence[str]:
    built("node/node_modules")
    return [program("node"), str(SERVERS / "node" / "server.js")]


@pytest.mark.parametrize(("scheme", "prepare"), [("http", rust), ("http", java), ("http", go), ("grpc", node)])
async def test_it_passes_the_check(
    scheme: str, prepare: Callable[[], Sequence[str]], checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Twice what gRPC itself allows.
    monkeypatch.setattr("rollmesh.reward_service.conformance.probes.load.MAX_MESSAGE", 8 << 20)
    environment = os.environ | {"NODE_PATH": str(BUILT / "node" / "node_modules")}
    process = subprocess.Popen([*prepare(), "0"], stdout=subprocess.PIPE, text=True, env=environment)
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
