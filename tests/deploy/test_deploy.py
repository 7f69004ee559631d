"""The deployment files agree with the product: every command, option, key and path they name exists."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
import yaml

from mesh.config import Config, load_config
from mesh.config.rollout import EngineName
from mesh.rpc import is_loopback
from rollmesh.cli.app import PERMANENT_CODE_VARIABLE, app

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
# As Compose reads it where no variable is set.
COMPOSE = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, Any] = yaml.safe_load(COMPOSE)["services"]
ROLLMESH = [name for name, service in SERVICES.items() if "command" in service and name not in ("redis", "prepare")]


def _check(arguments: list[str]) -> list[str]:
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


def _config(name: str) -> Config:
    """The configuration of a service that reads one, with the overrides of its command."""
    command = SERVICES[name]["command"]
    path = next(item for item in command if item.endswith(".yaml"))
    return load_config(REPOSITORY / Path(path).relative_to("/app"), _check(command))


@pytest.mark.parametrize("name", ROLLMESH)
def test_commands_exist_and_their_configuration_is_valid(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    command = SERVICES[name]["command"]
    _check(command)
    if command[0] == "generator":
        assert command[command.index("--advertise") + 1] == name, "others reach a container under its service name"
    else:
        assert _config(name).network.advertise == name


def test_the_mesh_of_the_demo_is_whole() -> None:
    roles = [SERVICES[name]["command"][0] for name in ROLLMESH]
    assert sorted(roles) == ["buffer", "generator", "generator", "learner", "reward"]
    assert "redis-server" in SERVICES["redis"]["command"]


def test_everyone_uses_the_address_of_the_buffer() -> None:
    port = _config("buffer").network.port
    for name in ROLLMESH:
        if name != "buffer":
            assert f"buffer:{port}" in SERVICES[name]["command"]


def test_beyond_loopback_only_with_the_token() -> None:
    for name in ROLLMESH:
        assert SERVICES[name]["secrets"] == ["mesh_token"]
        if SERVICES[name]["command"][0] == "generator":
            assert "/run/secrets/mesh_token" in SERVICES[name]["command"]
            continue
        config = _config(name)
        assert not is_loopback(config.network.host)
        assert str(config.security.token_file) == "/run/secrets/mesh_token"
        assert not config.security.allow_insecure


def test_generators_mount_nothing_and_only_the_buffer_sees_redis() -> None:
    for name in ROLLMESH:
        assert ("store" in SERVICES[name]["networks"]) == (name == "buffer")
        if SERVICES[name]["command"][0] == "generator":
            assert "volumes" not in SERVICES[name]
    assert SERVICES["redis"]["networks"] == ["store"]
    assert str(_config("buffer").buffer.redis).startswith("redis://redis:6379")


def test_what_crashes_comes_back_and_what_a_restart_does_not_mend_stays_away() -> None:
    for name in ROLLMESH:
        assert SERVICES[name]["restart"] == "on-failure"
        assert SERVICES[name]["environment"][PERMANENT_CODE_VARIABLE] == "0"


def test_redis_keeps_what_the_buffer_promises() -> None:
    command = SERVICES["redis"]["command"]
    assert "--appendfsync always" in command
    assert "--maxmemory-policy noeviction" in command


def test_what_is_prepared_is_what_the_learner_reads() -> None:
    module = SERVICES["prepare"]["entrypoint"][-1]
    assert find_spec(module) is not None
    out = SERVICES["prepare"]["command"][-1]
    config = _config("learner")
    assert SERVICES["learner"]["volumes"] == SERVICES["prepare"]["volumes"] == ["data:/data"]
    assert DOCKERFILE.count("WORKDIR /data\n") == 2, "relative paths of the configuration lie on the volume"
    for path in (config.model.path, config.data.train, config.data.eval):
        assert f"/data/{path}".startswith(f"{out}/")


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
    assert set(re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE, re.MULTILINE)) == {
        "source",
        "cpu",
        "hf",
        "vllm",
        "sglang",
        "cuda",
    }
    for argument in ("CPU_BASE", "CUDA_BASE", "TORCH", "TORCH_OPTIONS"):
        assert re.search(rf"^ARG {argument}=", DOCKERFILE, re.MULTILINE)
    for service in SERVICES.values():
        if "build" in service:
            assert service["build"]["target"] in ("cpu", "cuda", "hf")
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


@pytest.mark.parametrize("engine", get_args(EngineName))
def test_one_variable_chooses_the_engine(engine: str) -> None:
    """Of the images of the generators, of what they are told, and of what lies where they are told to look."""
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8").replace("${ROLLMESH_ENGINE:-hf}", engine)
    services = yaml.safe_load(text)["services"]
    assert f"FROM cpu AS {engine}\n" in DOCKERFILE
    for name in ("generator-1", "generator-2"):
        assert services[name]["build"]["target"] == engine
    for name in ("buffer", "learner"):
        overrides = [item for item in services[name]["command"] if item.startswith("--rollout.")]
        rollout = load_config(REPOSITORY / "examples" / "demo" / "demo.yaml", overrides).rollout
        assert rollout.engine == engine
        assert f"python3 -m venv {rollout.sglang.python.parents[1]} " in DOCKERFILE
    if engine != "hf":
        assert f"COPY deploy/engines/{engine}-cpu.txt" in DOCKERFILE


def test_readme_names_only_commands_that_exist() -> None:
    text = (DEPLOY / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"\brollmesh ((?:status|ledger|generator|run)\b[^\n`]*)", text)
    assert found
    for line in found:
        _check(line.split())
