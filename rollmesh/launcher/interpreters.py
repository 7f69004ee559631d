"""The Python interpreters of the services that a run names, and checks of their suitability.

Each service may run in an environment of its own, because the engines' requirements exclude one another. A wrong one
would show only after several starts of its service; a check before the start takes a moment. Relative paths are
relative to the folder in which `rollmesh` is started, as all paths of a configuration are.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollmesh.mesh.errors import ConfigError

# A cold start from a network disk takes its time.
_DEADLINE_S = 120.0
_PYTHON = "give a Python 3.11 or later"
_PROBE = """
import importlib.metadata, importlib.util, json, sys
if sys.argv[1]:
    import rollmesh.cli.app
print(json.dumps({
    "rollmesh": importlib.metadata.version("rollmesh") if sys.argv[1] else "",
    "engine": not sys.argv[2] or importlib.util.find_spec(sys.argv[2]) is not None,
}))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An interpreter and its purpose.

    Attributes:
        field: key of the configuration that names it.
        path: as the configuration has it; None: the one that runs `rollmesh`.
        service: it runs one of rollmesh's services.
        engine: inference engine that must be installed in its environment, if any.
    """

    field: str
    path: Path | None
    service: bool = True
    engine: str = ""


def command_of(python: Path | None, module: str = "rollmesh.cli") -> tuple[str, ...]:
    """The beginning of a command line that runs a module.

    Its imports are not looked for in the working folder (`-P`), where a user's `regex.py` may lie.
    """
    return (str(python or sys.executable), "-P", "-m", module)


def environment_of(python: Path | None) -> Mapping[str, str]:
    """Variables for an interpreter of another environment: the programs installed next to it come first."""
    if python is None:
        return {}
    return {"PATH": os.pathsep.join((str(python.absolute().parent), os.environ.get("PATH", os.defpath)))}


def check_interpreters(interpreters: Iterable[Interpreter]) -> None:
    """Checks each interpreter for its purpose.

    Raises:
        ConfigError: one is not there, does not run, lacks rollmesh in this version, or lacks the engine.
    """
    for interpreter in interpreters:
        if interpreter.path is None:
            if interpreter.engine and importlib.util.find_spec(interpreter.engine) is None:
                raise _without_engine(interpreter, sys.prefix)
            continue
        _check(interpreter, interpreter.path)


def _check(interpreter: Interpreter, path: Path) -> None:
    field = interpreter.field
    if not path.is_file():
        raise ConfigError(
            f"{field}: no such interpreter: {path}", hint="give the python in the bin folder of an environment"
        )
    arguments = ("yes" if interpreter.service else "", interpreter.engine)
    try:
        done = subprocess.run(
            [str(path), "-P", "-c", _PROBE, *arguments],
            capture_output=True,
            text=True,
            timeout=_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{field}: {path} does not run: {error}", hint=_PYTHON) from error
    ours = importlib.metadata.version("rollmesh")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]
        if not interpreter.service:
            raise ConfigError(f"{field}: {path} does not run: {reason}", hint=_PYTHON)
        raise ConfigError(f"{field}: {path} cannot load rollmesh: {reason}", hint=_install(path, ours))
    try:
        # The last line: an environment may print a greeting when its interpreter starts.
        found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        raise ConfigError(f"{field}: {path} is no Python: it runs, and answers nothing", hint=_PYTHON) from error
    if interpreter.service and found["rollmesh"] != ours:
        raise ConfigError(
            f"{field}: {path} has rollmesh {found['rollmesh']}, here it is {ours}", hint=_install(path, ours)
        )
    if not found["engine"]:
        raise _without_engine(interpreter, str(path))


def _install(path: Path, version: str) -> str:
    return f"{path} -m pip install rollmesh=={version}, or the folder of its sources"


def _without_engine(interpreter: Interpreter, where: str) -> ConfigError:
    engine = interpreter.engine
    return ConfigError(
        f"{interpreter.field}: {engine} is not installed in {where}",
        hint=f"`make {engine}` creates .venv-{engine}, name its bin/python; docs/engines.md has other ways",
    )
