"""Versions of Python and of the packages in each interpreter of a run, against what this release requires."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from rollmesh.doctor.findings import Finding, not_checked, ok, problem
from rollmesh.launcher.interpreters import Interpreter
from rollmesh.launcher.services import interpreters_of
from rollmesh.mesh.config.models import Config

CHECK = "versions"
# They differ between machines, and decide whether a run works; pip keeps the others in order.
_WATCHED = ("torch", "transformers", "grpcio", "protobuf", "redis", "vllm", "sglang", "megatron-core", "rollmesh")
_ENGINES = ("vllm", "sglang")
_DEADLINE_S = 60.0
_PROBE = """
import importlib.metadata, json, platform, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps([platform.python_version(), found]))
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """An interpreter and its packages.

    Attributes:
        field: the key that names it.
        path: of the interpreter.
        python: its version.
        packages: versions of the watched packages that it has, by name.
        service: it runs one of rollmesh's services, and so needs what rollmesh requires.
    """

    field: str
    path: str
    python: str
    packages: Mapping[str, str]
    service: bool = True


def check_versions(config: Config) -> Iterator[Finding]:
    """Versions in all interpreters of a run."""
    required = requirements(metadata.requires("rollmesh") or ())
    seen: dict[Path | None, Installed] = {}
    for interpreter in interpreters_of(config):
        if interpreter.path in seen:
            continue
        try:
            seen[interpreter.path] = probe(interpreter)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            yield not_checked(CHECK, f"{interpreter.field} ({interpreter.path}) does not answer: {error}")
    for installed in seen.values():
        yield from judge(installed, required)


def requirements(declared: Iterable[str]) -> dict[str, SpecifierSet]:
    """The supported versions of the watched packages; of an engine, those of its extra.

    Args:
        declared: requirements of the package rollmesh, as its metadata has them.
    """
    found = {"python": SpecifierSet(metadata.metadata("rollmesh")["Requires-Python"])}
    for text in declared:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.name in _WATCHED and requirement.specifier:
            found[requirement.name] = requirement.specifier
    return found


def probe(interpreter: Interpreter, run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run) -> Installed:
    """Asks an interpreter for its packages; the one that runs `rollmesh` is not started again.

    Raises:
        OSError, subprocess.SubprocessError, ValueError: it does not answer.
    """
    key = interpreter.field
    if interpreter.path is None:
        return Installed(key, sys.executable, platform.python_version(), _here(), interpreter.service)
    path = str(interpreter.path)
    command = [path, "-c", _PROBE, *_WATCHED]
    done = run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=True)
    python, packages = json.loads(done.stdout.splitlines()[-1])
    return Installed(key, path, python, packages, interpreter.service)


def _here() -> dict[str, str]:
    found = {}
    for name in _WATCHED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def judge(installed: Installed, required: Mapping[str, SpecifierSet]) -> Iterator[Finding]:
    """Compares an interpreter's versions with the supported ones."""
    wrong = False
    for name, version in {"python": installed.python, **installed.packages}.items():
        specifier = required.get(name)
        if specifier is None or (not installed.service and name not in _ENGINES):
            continue
        if not _fits(version, specifier):
            wrong = True
            yield problem(
                CHECK,
                f"{installed.field}: {installed.path} has {name} {version}, and this release needs {specifier}",
                _remedy(installed, name, specifier),
                package=name,
                version=version,
                required=str(specifier),
            )
    if not wrong:
        listed = ", ".join(f"{name} {version}" for name, version in installed.packages.items())
        yield ok(CHECK, f"{installed.field}: Python {installed.python}, {listed}")


def _fits(version: str, specifier: SpecifierSet) -> bool:
    try:
        # A build for a device has its own suffix, as 2.11.0+cpu: it is the same version.
        return specifier.contains(Version(version).public, prereleases=True)
    except InvalidVersion:
        return False


def _remedy(installed: Installed, name: str, specifier: SpecifierSet) -> str:
    if name == "python":
        return f"make an environment with Python {specifier}, and name its bin/python in {installed.field}"
    how = f"`make {name}` creates .venv-{name}; or " if name in _ENGINES else ""
    return f"{how}{installed.path} -m pip install '{name}{specifier}'"
