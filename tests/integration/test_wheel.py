"""The packages of a release. That the wheel trains: test_other_models.py, in the second tier."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

from tests.integration.wheel import NAMES, write_namesakes
from tests.repository import REPOSITORY

# Files that are no modules; the wheel has to have them all.
_DATA = {".lua", ".proto", ".binpb", ".pyi", ".html", ".css", ".js", ".typed", ".yaml", ".json"}


def test_the_wheel_holds_one_package_with_all_its_data(built: Path) -> None:
    with zipfile.ZipFile(built) as archive:
        names = set(archive.namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"rollmesh"}
    for part in NAMES[:6]:
        assert f"rollmesh/{part}/__init__.py" in names
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, check=True, capture_output=True)
    files = [Path(name) for name in tracked.stdout.decode().split("\0") if name]
    packages = {"rollmesh", *NAMES[:6]}
    data = [file for file in files if file.parts[0] in packages and file.suffix in _DATA]
    assert len(data) > 20
    expected = {str(file if file.parts[0] == "rollmesh" else Path("rollmesh") / file) for file in data}
    assert expected - names == set()


def test_the_sdist_holds_what_it_is_built_from_and_no_tests(built: Path) -> None:
    [sdist] = built.parent.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {Path(*Path(name).parts[1:]) for name in archive.getnames()}
    assert {Path("LICENSE"), Path("README.md"), Path("CHANGELOG.md"), Path("pyproject.toml")} <= names
    assert not [name for name in names if "tests" in name.parts[:1]]


def test_the_wheel_runs_in_an_environment_of_its_own(built: Path, tmp_path: Path) -> None:
    """With the packages of this one, of which none is a rollmesh there, among modules of the user's."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    target = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path / "env")}))
    # A path that is added this way brings its packages, and not the links of its editable ones.
    (target / "shared.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    install = [sys.executable, "-m", "pip", f"--python={python}", "install", "--quiet", "--no-deps", "--no-index"]
    # Hardly any of its modules is loaded here.
    subprocess.run([*install, "--no-compile", built], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = tmp_path / "env" / "bin" / "rollmesh"
    done = subprocess.run(
        [command, "--version"], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout == f"rollmesh {metadata.version('rollmesh')}\n"
    where = "import rollmesh.buffer.store, rollmesh.learner.engines, sys; print(rollmesh.__file__)"
    done = subprocess.run(
        [python, "-c", where],
        cwd=write_namesakes(tmp_path / "home"),
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert Path(done.stdout.strip()).is_relative_to(tmp_path)


def test_the_changelog_has_this_version() -> None:
    changes = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\n## {metadata.version('rollmesh')} " in changes
