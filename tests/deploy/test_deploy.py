"""The deployment files agree with the product: every command, option, key and path they name exists."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import socket
import subprocess
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest
import typer
import yaml

from rollmesh.buffer.redis_backend.access import RedisAccess
from rollmesh.buffer.redis_backend.embedded import find_redis_server
from rollmesh.buffer.store.keys import Keys
from rollmesh.cli.app import PERMANENT_CODE_VARIABLE, app
from rollmesh.launcher.services import _LEARNER_DRAIN_S
from rollmesh.learner.checkpoint.deadlines import LAST_S
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.config.redis_url import RedisOptions
from rollmesh.mesh.config.rollout import EngineName
from rollmesh.mesh.errors import StoreError
from rollmesh.mesh.runtime.die_with_parent import die_with_parent
from rollmesh.mesh.runtime.hosts import is_loopback
from tests.repository import REPOSITORY
from tests.secrets_here import write_secret

DEPLOY = REPOSITORY / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
# As Compose reads it where no variable is set.
COMPOSE = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, Any] = yaml.safe_load(COMPOSE)["services"]
SECRETS: dict[str, Any] = yaml.safe_load(COMPOSE)["secrets"]
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
    assert "redis-server" in SERVICES["redis"]["command"][-1]


def test_everyone_uses_the_address_of_the_buffer() -> None:
    port = _config("buffer").network.port
    for name in ROLLMESH:
        if name != "buffer":
            assert f"buffer:{port}" in SERVICES[name]["command"]


def test_each_service_has_a_grant_of_its_own_role_and_none_has_the_token() -> None:
    for name in ROLLMESH:
        own, *others = SERVICES[name]["secrets"]
        assert own == {"source": f"{name.replace('-', '_')}_grant", "target": "grant"}
        assert others == (["observer_grant", "metrics_key", "redis_password"] if name == "buffer" else ["metrics_key"])
        if SERVICES[name]["command"][0] == "generator":
            command = SERVICES[name]["command"]
            assert command[command.index("--token-file") + 1] == "/run/secrets/grant"
            assert command[command.index("--metrics-key-file") + 1] == "/run/secrets/metrics_key"
            continue
        config = _config(name)
        assert not is_loopback(config.network.host)
        assert str(config.security.token_file) == "/run/secrets/grant"
        assert str(config.security.metrics_key_file) == "/run/secrets/metrics_key"
        assert not config.security.allow_insecure
    assert "secrets" not in SERVICES["prepare"]


def test_readme_makes_the_secrets_that_services_are_given(tmp_path: Path) -> None:
    """Its own lines, in a shell: files that a container can read, in a folder that others cannot enter."""
    text = (DEPLOY / "README.md").read_text(encoding="utf-8")
    block = re.findall(r"```sh\n(.*?)cd \.\./\.\.\n", text, re.DOTALL)[0]
    # One interpreter for all commands: each would import the command line again.
    script = block.replace("rollmesh token", "rollmesh_token")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    calls = tmp_path / "calls"
    (bin_folder / "rollmesh_token").write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    (bin_folder / "rollmesh_token").chmod(0o755)
    (tmp_path / "deploy").mkdir()
    path = {"PATH": f"{bin_folder}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-ec", f"umask 077\n{script}"], cwd=tmp_path, env=os.environ | path, check=True)
    folder = tmp_path / "deploy" / "secrets"
    assert folder.stat().st_mode & 0o777 == 0o700
    for secret in SECRETS.values():
        file = folder / Path(secret["file"]).name
        assert file.stat().st_mode & 0o777 == 0o644
    made = [line.split() for line in calls.read_text().splitlines()]
    for arguments in made:
        _check(["token", *arguments])
    commands = [SERVICES[name]["command"][0] for name in ROLLMESH]
    assert sorted(words[1] for words in made if words[0] == "grant") == sorted([*commands, "observer"])


def test_generators_mount_nothing_and_only_the_buffer_sees_redis() -> None:
    for name in ROLLMESH:
        assert ("store" in SERVICES[name]["networks"]) == (name == "buffer")
        if SERVICES[name]["command"][0] == "generator":
            assert "volumes" not in SERVICES[name]
    # A front that is misused cannot harm the run folder.
    assert [name for name, service in SERVICES.items() if "data:/data" in service.get("volumes", [])] == [
        "prepare",
        "learner",
    ]
    assert SERVICES["redis"]["networks"] == ["store"]
    buffer = _config("buffer").buffer
    assert buffer.redis == "redis://rollmesh@redis:6379/0"
    assert str(buffer.redis_password_file) == "/run/secrets/redis_password"


def test_what_crashes_comes_back_and_what_a_restart_does_not_mend_stays_away() -> None:
    for name in ROLLMESH:
        assert SERVICES[name]["restart"] == "on-failure"
        assert SERVICES[name]["environment"][PERMANENT_CODE_VARIABLE] == "0"


def test_containers_give_the_learner_the_time_that_the_launcher_gives_it() -> None:
    assert SERVICES["learner"]["stop_grace_period"] == f"{LAST_S + _LEARNER_DRAIN_S:.0f}s"


def test_no_container_has_more_rights_than_it_needs() -> None:
    for name, service in SERVICES.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not {"ports", "privileged", "cap_add", "devices", "pid", "ipc"} & set(service), name
    assert re.findall(r"^USER (\w+)$", DOCKERFILE, re.MULTILINE)[-1] == "rollmesh"
    assert SERVICES["redis"]["user"] == "redis"
    # It runs what is in its image on a volume that others read.
    assert SERVICES["prepare"]["network_mode"] == "none"


def test_redis_keeps_what_the_buffer_promises() -> None:
    command = SERVICES["redis"]["command"][-1]
    assert "--appendfsync always" in command
    assert "--maxmemory-policy noeviction" in command


async def test_redis_knows_the_buffer_alone_and_lets_it_do_no_more_than_it_needs(tmp_path: Path) -> None:
    """The command of its container, without a container."""
    password = write_secret(tmp_path / "password", base64.b64encode(os.urandom(32)).decode())
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    shell, option, script = SERVICES["redis"]["command"]
    # As Compose hands it over, with the paths and the port of this test.
    script = script.replace("$$", "$").replace("/run/secrets/redis_password", str(password))
    script = script.replace("--dir /data", f"--dir {tmp_path} --bind 127.0.0.1 --port {port}")
    binaries = str(Path(find_redis_server()).parent)
    path = os.environ | {"PATH": f"{binaries}:{os.environ['PATH']}"}
    server = subprocess.Popen(die_with_parent([shell, option, script]), env=path, stdout=subprocess.DEVNULL)
    options = RedisOptions(password_file=password)
    access = RedisAccess(f"redis://rollmesh@127.0.0.1:{port}/0", "{rollmesh:demo}", options=options)
    stranger = RedisAccess(f"redis://127.0.0.1:{port}/0", "{rollmesh:demo}")
    try:
        async with asyncio.timeout(180):
            while True:
                with suppress(StoreError):
                    await access.wait_until_loaded(30)
                    break
                await asyncio.sleep(0.02)
        await access.check_acl(Keys("demo").payload("train", "none", 0, 0))
        with pytest.raises(StoreError, match="refuses this user: NOAUTH"):
            await stranger.wait_until_loaded(1)
        for harmful in ("CONFIG", "GET", "*"), ("MODULE", "LIST"), ("FLUSHALL",), ("KEYS", "*"):
            with pytest.raises(StoreError, match="does not let this user"):
                await access.batch([harmful])
        assert password.read_text().strip() not in " ".join(psutil.Process(server.pid).cmdline())
    finally:
        server.terminate()
        await asyncio.to_thread(server.wait)
        await access.close()
        await stranger.close()


def test_what_is_prepared_is_what_the_learner_reads() -> None:
    module = SERVICES["prepare"]["entrypoint"][-1]
    assert find_spec(module) is not None
    out = SERVICES["prepare"]["command"][-1]
    config = _config("learner")
    assert SERVICES["learner"]["volumes"] == SERVICES["prepare"]["volumes"] == ["data:/data"]
    assert DOCKERFILE.count("WORKDIR /data\n") == 2, "relative paths of the configuration lie on the volume"
    for path in (config.model.path, *(source.path for source in (*config.data.train, *(config.data.eval or ())))):
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
    """Checks the generators' images, their arguments, and the files at the places named in these."""
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
    text = (DEPLOY / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")
    found = re.findall(
        r"(?:\brollmesh|^mesh|^after) ((?:status|ledger|generator|evals|report|export)\b[^\n`]*)", text, re.M
    )
    found += re.findall(r"^rollmesh ((?:buffer|reward|learner) [^\n]*)", text, re.M)
    assert len(found) == 11
    for line in found:
        _check(line.split())


def test_security_page_shows_commands_and_settings_that_exist() -> None:
    text = (REPOSITORY / "docs" / "security.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"^rollmesh ((?:[^#&\n])+)", text, re.MULTILINE)
    assert len(commands) == 8
    for line in commands:
        _check(line.split())
    [settings] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    Config.model_validate(
        load_config(REPOSITORY / "examples" / "demo" / "demo.yaml").model_dump() | yaml.safe_load(settings)
    )
