"""The README's commands for separate nodes: each service started by hand, knowing the buffer's address alone."""

import asyncio
import json
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from rollmesh.buffer.redis_backend.embedded import EmbeddedRedis
from rollmesh.mesh.runtime.fork_server import client
from tests import fork_server
from tests.command import Command
from tests.report_page import read_charts
from tests.repository import REPOSITORY
from tests.secrets_here import told, write_secret


@contextmanager
def service(
    folder: Path, name: str, *arguments: str, cwd: Path = REPOSITORY, env: dict[str, str] | None = None
) -> Iterator[fork_server.RunningCommand]:
    """A service as its own process; its log tells why, where it fails."""
    with (folder / f"{name}.log").open("w") as log:
        process = fork_server.popen(arguments, cwd=cwd, env=env, stdout=log, stderr=log)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(240)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(60)


def _address(folder: Path, ready: Path, process: fork_server.RunningCommand) -> str:
    """Waits for the ready file; the file system has no event that needs no further package."""
    while not ready.exists():
        try:
            process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError((folder / "buffer.log").read_text())
    return str(json.loads(ready.read_text())["address"])


@pytest.fixture
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], str]]:
    """A Redis of the user's, as the configuration names it, and its password."""
    folder = tmp_path_factory.mktemp("redis")
    server = EmbeddedRedis(folder)
    asyncio.run(server.start())
    login, _, path = server.admin_url.rpartition("@")
    url, _, password = login.rpartition(":")
    file = write_secret(folder / "password", password)
    yield {"redis": f"{url}@{path}", "redis_password_file": str(file)}, password
    asyncio.run(server.stop())


# A forked process is as an executed one (tests/mesh/runtime); test_engines.py executes a generator, too.
@pytest.mark.slow
@pytest.mark.parametrize("executed", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_services_started_by_hand_train_to_the_end(
    demo_data: Path,
    tmp_path: Path,
    rollmesh: Command,
    own_redis: tuple[dict[str, str], str],
    monkeypatch: pytest.MonkeyPatch,
    executed: bool,
) -> None:
    """The generator has nothing but the address, neither files nor environment; it leaves when all is done. Redis is
    the user's own, and its password stays where it is."""
    if not executed:
        # Though the generator's environment is another one.
        monkeypatch.setattr(client, "can_fork", lambda *_: True)
    config = yaml.safe_load((REPOSITORY / "examples" / "demo" / "demo.yaml").read_text())
    config["run"] = {"name": "run", "dir": str(tmp_path)}
    config["model"]["path"] = str(demo_data / "model")
    config["data"] = {"train": str(demo_data / "train.parquet")}
    config["learner"] |= {"steps": 3, "batch": {"groups": 8}}
    config["buffer"], password = {**config.get("buffer", {}), **own_redis[0]}, own_redis[1]
    # A file of a user's, which only the learner has.
    algorithm = REPOSITORY / "examples" / "dataflows" / "rejection_sampling.py"
    config["algorithm"] = {"name": f"{algorithm}:RejectionSampling", "threshold": 0.0}
    cfg = tmp_path / "cfg.yaml"
    cfg.write_text(yaml.safe_dump(config))
    ready = tmp_path / "ready.json"
    empty = tmp_path / "empty"
    empty.mkdir()
    bare = {"PATH": os.environ["PATH"], "HOME": str(empty), "OMP_NUM_THREADS": "1"}
    with service(tmp_path, "buffer", "buffer", str(cfg), "--port", "0", "--ready-file", str(ready)) as buffer:
        mesh = _address(tmp_path, ready, buffer)
        with (
            service(tmp_path, "reward", "reward", str(cfg), "--mesh", mesh) as reward,
            service(
                tmp_path, "generator", "generator", "--mesh", mesh, "--threads", "1", cwd=empty, env=bare
            ) as generator,
            service(tmp_path, "learner", "learner", str(cfg), "--mesh", mesh) as learner,
        ):
            started = [process.pid for process in (buffer, reward, generator, learner)]
            assert generator.forked != executed
            assert told([password], tmp_path, started) == []
            assert learner.wait() == 0, (tmp_path / "learner.log").read_text()
            assert generator.wait() == 0, (tmp_path / "generator.log").read_text()
            assert reward.wait() == 0, (tmp_path / "reward.log").read_text()
            assert [path for path in empty.rglob("*") if not path.is_dir()] == []
            ledger = rollmesh("ledger", "--mesh", mesh)
            assert ledger.returncode == 0, ledger.stdout + ledger.stderr
    # No launcher was there, and what a run is worth can be had all the same.
    run = str(tmp_path / "run")
    for command in (("report", run), ("samples", run), ("export", run, str(tmp_path / "hf"))):
        done = rollmesh(*command)
        assert done.returncode == 0, done.stdout + done.stderr
    assert told([password], tmp_path) == []
    assert {"reward", "staleness", "throughput"} <= read_charts(tmp_path / "run" / "report.html")
    assert (tmp_path / "hf" / "model.safetensors").stat().st_mode & 0o077 == (
        tmp_path / "hf" / "config.json"
    ).stat().st_mode & 0o077


def test_the_readme_names_commands_that_exist(rollmesh: Command) -> None:
    text = (REPOSITORY / "README.md").read_text() + (REPOSITORY / "docs" / "operations.md").read_text()
    shown = rollmesh("--help")
    known = set(re.findall(r"^  (\w+)  ", shown.stdout, re.MULTILINE))
    named = set(re.findall(r"rollmesh (\w+) ", text)) - {"as", "on"}
    assert named <= known, named - known
