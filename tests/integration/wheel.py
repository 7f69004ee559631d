"""The packages of this tree, and a place where modules of a user's are called as their parts are."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.repository import REPOSITORY

NAMES = ("buffer", "generators", "learner", "mesh", "protos", "reward_service", "deploy", "tests")
_NOT_BUILT = shutil.ignore_patterns(".*", "tests", "benchmarks", "docs", "build", "*.egg-info", "__pycache__")


def build(folder: Path) -> Path:
    """The wheel of this tree's sdist; both are written to `folder`."""
    shutil.copytree(REPOSITORY, folder / "source", symlinks=True, ignore=_NOT_BUILT)
    # To ask for the needs of a build takes as long as the build.
    options = ["--no-isolation", "--skip-dependency-check", "--outdir", folder]
    command = [sys.executable, "-m", "build", *options, folder / "source"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    [built] = folder.glob("*.whl")
    return built


def unpack(wheel: Path, folder: Path) -> Path:
    """Writes what a wheel holds to a folder for PYTHONPATH."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def write_namesakes(folder: Path) -> Path:
    """Writes modules and packages that nothing of the wheel's may import."""
    for index, name in enumerate(NAMES):
        own = folder / name / "__init__.py" if index % 2 else folder / f"{name}.py"
        own.parent.mkdir(parents=True, exist_ok=True)
        own.write_text(f"raise ImportError('{name} is not rollmesh')\n")
    return folder
