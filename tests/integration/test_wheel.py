"""A wheel brings one package: modules of a user's that are called as its parts are do it no harm."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rollmesh.report.summary import read_summary
from tests.repository import REPOSITORY

_NAMES = ("buffer", "generators", "learner", "mesh", "protos", "reward_service", "deploy", "tests")
_NOT_BUILT = shutil.ignore_patterns(".*", "tests", "benchmarks", "docs", "build", "*.egg-info", "__pycache__")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(REPOSITORY, folder / "source", symlinks=True, ignore=_NOT_BUILT)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", folder, folder / "source"], check=True, timeout=120)
    [built] = folder.glob("*.whl")
    return built


def test_it_holds_one_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"rollmesh"}
    for part in _NAMES[:6]:
        assert f"rollmesh/{part}/__init__.py" in names


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_it_runs_among_modules_of_those_names(wheel: Path, demo_data: Path, tmp_path: Path) -> None:
    site, home = tmp_path / "site", tmp_path / "home"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for index, name in enumerate(_NAMES):
        own = home / name / "__init__.py" if index % 2 else home / f"{name}.py"
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(f"raise ImportError('{name} is not rollmesh')\n")
    overrides = {
        "model.path": demo_data / "model",
        "data.train": demo_data / "train.parquet",
        "data.eval": demo_data / "eval.parquet",
        "run.dir": tmp_path,
        "run.name": "run",
        "learner.steps": 2,
        "rollout.replicas": 1,
    }
    options = [f"--{key}={value}" for key, value in overrides.items()]
    config = REPOSITORY / "examples" / "demo" / "demo.yaml"
    done = subprocess.run(
        [sys.executable, "-m", "rollmesh.cli", "run", config, *options],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert read_summary(tmp_path / "run").steps == 2
