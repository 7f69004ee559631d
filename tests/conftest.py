"""Shared by several packages' tests: the third-party reward server of `examples/`, in an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

# An example takes as long as the machine is busy; the suite's own timeouts end what hangs.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests that need a GPU where there is none."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.fixture(scope="session")
def foreign_python(request: pytest.FixtureRequest) -> Path:
    """Interpreter of an environment that holds gRPC's packages and nothing of ours; kept between test runs."""
    folder = request.config.cache.mkdir("reward-server-venv") / f"{sys.version_info.major}.{sys.version_info.minor}"
    python = folder / "bin" / "python"
    ready = folder / "ready"
    with FileLock(folder.parent / "lock", timeout=110):
        _install(folder, ready)
    return python


def _install(folder: Path, ready: Path) -> None:
    python = folder / "bin" / "python"
    if not ready.exists():
        venv.create(folder, with_pip=True, clear=True)
        install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "grpcio", "grpcio-tools"]
        done = subprocess.run(install, capture_output=True, text=True, timeout=90, check=False)
        if done.returncode:
            pytest.skip(f"pip cannot install grpcio here: {done.stderr.strip().splitlines()[-1:]}")
        ready.touch()


@pytest.fixture(scope="session")
def third_party_server(foreign_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of `examples/reward_server`, copied out of the repository and run by `foreign_python`."""
    folder = tmp_path_factory.mktemp("third-party")
    for name in ("server.py", "reward.proto"):
        (folder / name).write_text((ROOT / "examples" / "reward_server" / name).read_text())
    process = subprocess.Popen(
        [foreign_python, "server.py", "0"], cwd=folder, env={"PATH": ""}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # the test's own time-out bounds the wait
        assert line.startswith("listening on "), line
        yield f"grpc://{line.split()[-1]}"
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()
