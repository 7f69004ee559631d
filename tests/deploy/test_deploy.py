"""The deployment files agree with the product: every command, option, key and path they name exists."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import pytest
import typer
import yaml

from mesh.config import Config, load_config
from mesh.config.load import parse_overrides
from mesh.rpc import is_loopback
from rollmesh.cli.app import app

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
SERVICES: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]
ROLLMESH = [name for name, service in SERVICES.items() if "command" in service and name not in ("redis", "prepare")]


@cache
def _root() -> click.Command:
    return typer.main.get_command(app)


def _check(arguments: list[str]) -> list[str]:
    """Resolves a command line of `rollmesh` and returns its `--section.key=value` overrides.

    Fails where a command or an option does not exist, or an option lacks its value.
    """
    command, context = _root(), click.Context(_root(), info_name="rollmesh")
    rest = list(arguments)
    while isinstance(command, click.Group):
        found = command.get_command(context, rest[0])
        assert found is not None, f"no command {rest[0]!r}"
        command, rest = found, rest[1:]
    overrides = [item for item in rest if re.match(r"--\w+\.[\w.]+=", item)]
    plain = [item for item in rest if item not in overrides]
    # Parses without running: an unknown option or a missing value raises click.UsageError.
    command.ignore_unknown_options = False
    command.make_context("rollmesh", plain, resilient_parsing=False, allow_extra_args=False)
    return overrides


def _config(overrides: list[str]) -> Config:
    return load_config(DEPLOY / "demo.yaml", overrides)


@pytest.mark.parametrize("name", ROLLMESH)
def test_commands_exist_and_their_configuration_is_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    command = SERVICES[name]["command"]
    overrides = _check(command)
    if "deploy/demo.yaml" in command:
        config = _config(overrides)
        assert config.network.advertise == name, "others reach a container under its service name"
    else:
        assert command[command.index("--advertise") + 1] == name


def test_the_mesh_of_the_demo_is_whole() -> None:
    roles = [SERVICES[name]["command"][0] for name in ROLLMESH]
    assert sorted(roles) == ["buffer", "generator", "generator", "learner", "reward"]
    assert "redis-server" in SERVICES["redis"]["command"]


def test_everyone_uses_the_address_of_the_buffer() -> None:
    command = SERVICES["buffer"]["command"]
    port = command[command.index("--port") + 1]
    for name in ROLLMESH:
        if name != "buffer":
            assert f"buffer:{port}" in SERVICES[name]["command"]


def test_beyond_loopback_only_with_the_token() -> None:
    config = _config([])
    assert not is_loopback(config.network.host)
    assert str(config.security.token_file) == "/run/secrets/mesh_token"
    assert not config.security.allow_insecure
    for name in ROLLMESH:
        assert SERVICES[name]["secrets"] == ["mesh_token"]
        if SERVICES[name]["command"][0] == "generator":
            assert "/run/secrets/mesh_token" in SERVICES[name]["command"]


def test_generators_mount_nothing_and_only_the_buffer_sees_redis() -> None:
    for name in ROLLMESH:
        assert ("store" in SERVICES[name]["networks"]) == (name == "buffer")
        if SERVICES[name]["command"][0] == "generator":
            assert "volumes" not in SERVICES[name]
    assert SERVICES["redis"]["networks"] == ["store"]
    assert str(_config([]).buffer.redis).startswith("redis://redis:6379")


def test_redis_keeps_what_the_buffer_promises() -> None:
    command = SERVICES["redis"]["command"]
    assert "--appendfsync always" in command
    assert "--maxmemory-policy noeviction" in command


def test_what_is_prepared_is_what_the_learner_reads() -> None:
    module = SERVICES["prepare"]["entrypoint"][-1]
    assert find_spec(module) is not None
    out = SERVICES["prepare"]["command"][-1]
    config = _config([])
    for path in (config.model.path, config.data.train, config.data.eval):
        assert str(path).startswith(f"{out}/")
    mounts = [volume.split(":")[1] for volume in SERVICES["learner"]["volumes"]]
    assert any(str(config.run.dir).startswith(f"{mount}/") for mount in mounts)


def test_health_check_is_a_command_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    kind, program, *arguments = SERVICES["buffer"]["healthcheck"]["test"]
    assert (kind, program) == ("CMD", "rollmesh")
    assert _check(arguments) == []


def test_image_holds_every_package_and_only_what_exists() -> None:
    copied = re.findall(r"^COPY (\S+(?: \S+)*) \S+$", DOCKERFILE, re.MULTILINE)
    sources = {item for line in copied for item in line.split() if not item.startswith("--from") and item != "/"}
    for source in sources:
        assert (REPOSITORY / source).exists(), f"{source} is copied into the image but is not in the repository"
    allowed = (REPOSITORY / ".dockerignore").read_text(encoding="utf-8")
    assert sources == set(re.findall(r"^!(\S+)$", allowed, re.MULTILINE))
    project = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    packages = {name.rstrip("*") for name in re.findall(r'"(\w+\*)"', project)}
    assert packages <= sources


def test_targets_and_replaceable_sources() -> None:
    assert set(re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE)) == {"source", "cpu", "cuda"}
    for argument in ("CPU_BASE", "CUDA_BASE", "TORCH", "TORCH_INDEX"):
        assert re.search(rf"^ARG {argument}=", DOCKERFILE, re.MULTILINE)
    for service in SERVICES.values():
        if "build" in service:
            assert service["build"]["target"] in ("cpu", "cuda")
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_readme_names_only_commands_that_exist() -> None:
    text = (DEPLOY / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"\brollmesh ((?:status|ledger|samples|export|run)\b[^\n`]*)", text)
    assert found
    for line in found:
        command = line.split()[0]
        assert isinstance(_root(), click.Group)
        assert _root().get_command(click.Context(_root()), command) is not None
    for key in re.findall(r"--([a-z_]+\.[a-z_.]+)=", text):
        assert parse_overrides([f"{key}=1"])
