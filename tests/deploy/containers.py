"""The container files as Compose reads them, and the command lines that result."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import typer
import yaml

from rollmesh.cli.app import app
from rollmesh.mesh.config import Config, load_config
from tests.repository import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
MEMBERS = ("buffer", "reward", "learner", "generator")
_ASSIGNMENT = re.compile(r"^([A-Z_]+)=(.*)$", re.MULTILINE)
VARIABLE = re.compile(r"\$\{([A-Z_]+)\}")


def settings() -> dict[str, str]:
    """The variables of `.env`."""
    return dict(_ASSIGNMENT.findall((DEPLOY / ".env").read_text(encoding="utf-8")))


def composed(name: str = "compose.yaml", **changed: str) -> dict[str, Any]:
    """A file of Compose, with the variables of `.env` but for those that are changed."""
    values = settings() | changed
    text = (DEPLOY / name).read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(VARIABLE.sub(lambda match: values[match[1]], text))
    return found


def command_line(service: dict[str, Any], folder: Path, secrets: Path) -> list[str]:
    """Arguments with which `service.sh` starts `rollmesh` in the container of a service.

    Args:
        folder: for a program that stands in for `rollmesh`.
        secrets: as they are mounted there.
    """
    [script] = service["entrypoint"]
    folder.mkdir(exist_ok=True)
    (folder / "rollmesh").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (folder / "rollmesh").chmod(0o755)
    environment = {
        **{name: str(value) for name, value in service["environment"].items()},
        "PATH": f"{folder}:{os.environ['PATH']}",
        "MESH_SECRETS": str(secrets),
    }
    path = DEPLOY / Path(script).relative_to("/app")
    arguments = service["command"].split()
    return subprocess.run(
        [path, *arguments], env=environment, capture_output=True, text=True, check=True
    ).stdout.split()


def overrides_of(arguments: list[str]) -> list[str]:
    """Resolves a command line of `rollmesh` and returns its `--section.key=value` overrides.

    Fails where a command or an option does not exist, or an argument is left over.
    """
    command: Any = typer.main.get_command(app)
    rest = list(arguments)
    while hasattr(command, "commands"):
        assert rest[0] in command.commands, f"no command {rest[0]!r}"
        command, rest = command.commands[rest[0]], rest[1:]
    takes_value = {
        option: not parameter.is_flag
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("-")
    }
    places = sum(1 for parameter in command.params if not parameter.opts[0].startswith("-"))
    overrides = []
    while rest:
        item = rest.pop(0)
        if re.match(r"--\w+\.[\w.]+=", item):
            overrides.append(item)
        elif item.startswith("-"):
            assert item in takes_value, f"`rollmesh {' '.join(arguments)}`: no option {item}"
            if takes_value[item]:
                assert rest, f"{item} lacks its value"
                rest.pop(0)
        else:
            places -= 1
            assert places >= 0, f"`rollmesh {' '.join(arguments)}`: unexpected {item!r}"
    return overrides


def configuration(arguments: list[str]) -> Config:
    """The configuration of a service that reads one, from its command line."""
    path = next(item for item in arguments if item.endswith(".yaml"))
    return load_config(REPOSITORY / Path(path).relative_to("/app"), overrides_of(arguments))
