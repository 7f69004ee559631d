"""The container files as Compose reads them, and the command lines and settings that result."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import typer
import yaml

from rollmesh.cli.app import app
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.config.variables import overrides_from
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
    found: dict[str, Any] = yaml.safe_load(VARIABLE.sub(lambda match: values[match[1]], text).replace("$$", "$"))
    for key, service in found["services"].items():
        if base := service.pop("extends", None):
            found["services"][key] = composed(base["file"], **changed)["services"][base["service"]] | service
    return found


def variables(service: dict[str, Any]) -> dict[str, str]:
    """The environment variables of a service's container."""
    texts = [(DEPLOY / name).read_text(encoding="utf-8") for name in service.get("env_file", ())]
    return dict(_ASSIGNMENT.findall("\n".join(texts))) | {
        name: str(value) for name, value in service["environment"].items()
    }


def command_line(service: dict[str, Any]) -> list[str]:
    """Arguments with which `rollmesh` starts in the container of a service, whose name is `container`."""
    arguments = (service["command"] or "").split()
    if "entrypoint" not in service:
        return arguments
    environment = variables(service) | {"HOSTNAME": "container"}
    shell, option, script, *rest = service["entrypoint"]
    script = script.replace("exec rollmesh", "printf '%s\\n'")
    return subprocess.run(
        [shell, option, script, *rest, *arguments], env=environment, capture_output=True, text=True, check=True
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


def configuration(service: dict[str, Any]) -> Config:
    """The configuration of a service that reads one, from its variables and its command line."""
    arguments = command_line(service)
    path = next(item for item in arguments if item.endswith(".yaml"))
    given = [*overrides_from(variables(service)), *overrides_of(arguments)]
    return load_config(REPOSITORY / Path(path).relative_to("/app"), given)
