"""Services in environments of their own: commands, and what is found wrong before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rollmesh.cli.explanations.explain import explain
from rollmesh.launcher.interpreters import check_interpreters, command_of
from rollmesh.launcher.placement.devices import DevicePlan
from rollmesh.launcher.placement.preparation import Preparation
from rollmesh.launcher.services import ServiceCatalogue, interpreters_of
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.rpc.held_ports import HeldPorts
from rollmesh.mesh.runtime.threads import ThreadPlan

ENVIRONMENTS = {
    "buffer.python": "/envs/b/bin/python",
    "learner.python": "/envs/l/bin/python",
    "reward.python": "/envs/r/bin/python",
    "rollout.python": "/envs/g/bin/python",
}


def config(**values: object) -> Config:
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in values.items()]
    source = {"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "algorithm": "grpo"}
    return load_config(source, overrides)


# Loading it is asked of one interpreter, where it is true.
LOADED = "import sys, types; sys.modules['rollmesh.cli.app'] = types.ModuleType('app')"


def python_that(folder: Path, *lines: str) -> Path:
    """An interpreter of this environment that runs some lines of Python first."""
    (folder / "first.py").write_text("\n".join(textwrap.dedent(line) for line in lines))
    script = folder / "python"
    script.write_text(
        f'#!/bin/sh\nshift 2\nprogram="$(cat {folder}/first.py; echo; echo "$1")"\nshift\n'
        f'exec {sys.executable} -P -c "$program" "$@"\n'
    )
    script.chmod(0o755)
    return script


def check(**values: object) -> None:
    check_interpreters(interpreters_of(config(**values)))


def catalogue_of(asked: Config, plan: ThreadPlan) -> ServiceCatalogue:
    # Its commands need the numbers alone.
    with HeldPorts(asked.network.host) as ports:
        return ServiceCatalogue(asked, Path("cfg.yaml"), plan, Preparation(DevicePlan()), ports, allow_changes=False)


def test_each_service_is_started_by_its_own() -> None:
    asked = config(**{key.replace(".", "__"): path for key, path in ENVIRONMENTS.items()})
    catalogue = catalogue_of(asked, ThreadPlan(2, 1, 3))
    specs = {spec.name: spec for spec in (*catalogue.buffer(), *catalogue.others("host:1"))}
    owners = {"buffer": "b", "learner": "l", "reward": "r", "generator-0": "g"}
    for name, owner in owners.items():
        command = specs[name].command(False)
        assert command[0] == f"/envs/{owner}/bin/python"
        assert sys.executable not in command
        # Packages next to the interpreter are found before those next to this one.
        assert specs[name].environment["PATH"].split(os.pathsep)[0] == f"/envs/{owner}/bin"
    assert specs["generator-0"].environment["OMP_NUM_THREADS"] == "3"


def test_without_names_it_is_this_one() -> None:
    catalogue = catalogue_of(config(), ThreadPlan(2, 1, 1))
    for spec in (*catalogue.buffer(), *catalogue.others("host:1")):
        assert spec.command(False)[0] == sys.executable
        assert "PATH" not in spec.environment


def test_good_ones_pass() -> None:
    check(rollout__python=sys.executable, learner__python=sys.executable)


def test_only_what_is_started_is_asked() -> None:
    nowhere = {"rollout__python": "/nowhere/python", "rollout__engine": "vllm", "reward__python": "/nowhere/python"}
    check(**nowhere, rollout__replicas=0, reward__in_process=True)


def test_one_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"learner\.python: no such interpreter: /nowhere/python"):
        check(learner__python="/nowhere/python")


def test_one_that_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "python").write_text("text")
    with pytest.raises(ConfigError, match=r"reward\.python: .* does not run"):
        check(reward__python=tmp_path / "python")


@pytest.mark.parametrize("program", ["true", "echo hello"])
def test_one_that_is_no_python(program: str, tmp_path: Path) -> None:
    """It runs, and says nothing of what it was asked."""
    (tmp_path / "python").write_text(f"#!/bin/sh\n{program}\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(ConfigError, match=r"reward\.python: .* is no Python"):
        check(reward__python=tmp_path / "python")


def test_one_that_greets(tmp_path: Path) -> None:
    """A site's own customization may print what it likes."""
    check(reward__python=python_that(tmp_path, LOADED, "print('welcome')"))


def test_a_server_that_cannot_be_asked_is_not_told_to_install_rollmesh(tmp_path: Path) -> None:
    broken = python_that(tmp_path, "raise SystemError('too old')")
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.python: .* does not run: .*too old") as caught:
        check(rollout__engine="sglang", rollout__sglang__python=broken)
    assert "pip install" not in str(caught.value)


def test_one_without_rollmesh(tmp_path: Path) -> None:
    lacking = python_that(tmp_path, "import sys", "sys.modules['rollmesh'] = None")
    with pytest.raises(ConfigError, match=r"rollout\.python: .* cannot load rollmesh: .*rollmesh.* pip install"):
        check(rollout__python=lacking)


def test_one_with_another_version(tmp_path: Path) -> None:
    version = "import importlib.metadata; importlib.metadata.version = lambda name: '0.0.7'"
    other = python_that(tmp_path, LOADED, version)
    with pytest.raises(ConfigError, match=r"buffer\.python: .* has rollmesh 0\.0\.7, here it is"):
        check(buffer__python=other)


@pytest.mark.parametrize("named", [True, False])
def test_an_engine_that_is_missing(named: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In the environment that is named, or in this one where none is."""
    hide = "import importlib.util; importlib.util.find_spec = lambda name: None"
    python = {"rollout__python": python_that(tmp_path, LOADED, hide)} if named else {}
    if not named:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"rollout\.python: vllm is not installed in .*make vllm"):
        check(rollout__engine="vllm", **python)


def test_the_server_of_sglang_has_its_own(tmp_path: Path) -> None:
    """It needs no rollmesh, and the generator next to it no SGLang."""
    hide = "import importlib.util; importlib.util.find_spec = lambda name: None"
    lacking = python_that(tmp_path, hide)
    with pytest.raises(ConfigError, match=r"rollout\.sglang\.python: sglang is not installed"):
        check(rollout__engine="sglang", rollout__sglang__python=lacking)
    there = python_that(
        tmp_path,
        "import sys, importlib.util",
        "sys.modules['rollmesh'] = None",
        "importlib.util.find_spec = lambda name: name == 'sglang'",
    )
    check(rollout__engine="sglang", rollout__sglang__python=there)
    check(rollout__engine="sglang", rollout__sglang__address="http://127.0.0.1:1")


def test_explain_says_who_runs_what() -> None:
    lines = list(explain(config(rollout__engine="vllm", rollout__python="envs/v/bin/python")))
    assert "generators: engine vllm, tensor parallel 1, data parallel 1" in lines
    assert "rollout.python: envs/v/bin/python" in lines


def test_a_service_imports_nothing_of_the_working_folder(tmp_path: Path) -> None:
    """A file that is named like a module breaks none."""
    (tmp_path / "typer.py").write_text("raise RuntimeError")
    subprocess.run([*command_of(None), "--version"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
