"""The compose file agrees with the product: each command, option, key, path and variable that it names exists."""

from __future__ import annotations

import re
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest

from rollmesh.cli.app import PERMANENT_CODE_VARIABLE
from rollmesh.launcher.services import _LEARNER_DRAIN_S
from rollmesh.learner.checkpoint.deadlines import LAST_S
from rollmesh.mesh.config.rollout import EngineName
from rollmesh.mesh.config.variables import check_variables
from rollmesh.mesh.runtime.hosts import is_loopback
from tests.deploy.containers import (
    DEPLOY,
    MEMBERS,
    VARIABLE,
    command_line,
    composed,
    configuration,
    overrides_of,
    settings,
    variables,
)
from tests.repository import REPOSITORY

COMPOSE = composed()
SERVICES: dict[str, Any] = COMPOSE["services"]
DEVICES = "compose.devices.yaml"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
TLS = ("ca.crt", "tls.crt", "tls.key")
SECURITY = "ROLLMESH__SECURITY__"


@pytest.fixture(autouse=True)
def repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


@pytest.mark.parametrize("tls", ["off", "on"])
@pytest.mark.parametrize("name", MEMBERS)
def test_commands_exist_and_their_settings_are_valid(name: str, tls: str) -> None:
    service = composed(ROLLMESH_TLS=tls)["services"][name]
    arguments, given = command_line(service), variables(service)
    assert arguments[0] == name
    overrides_of(arguments)
    check_variables(given)
    certificates = [given.get(f"{SECURITY}{key}") for key in ("TLS_CA", "TLS_CERT", "TLS_KEY")]
    assert certificates == ([f"/run/secrets/{file}" for file in TLS] if tls == "on" else [None] * 3)
    assert given[f"{SECURITY}TOKEN_FILE"] == "/run/secrets/grant"
    assert given[f"{SECURITY}METRICS_KEY_FILE"] == "/run/secrets/metrics.key"
    if name == "generator":
        assert given[f"{SECURITY}ENDPOINT_KEY_FILE"] == "/run/secrets/endpoint.key"
        assert option(arguments, "--advertise") == f"container.{COMPOSE['networks']['mesh']['name']}"
        return
    config = configuration(service)
    assert config.network.advertise == name, "others reach a container under its service name"
    assert not is_loopback(config.network.host)
    assert not config.security.allow_insecure


def test_everyone_uses_the_address_of_the_buffer() -> None:
    port = configuration(SERVICES["buffer"]).network.port
    for name in (*MEMBERS, "dashboard"):
        assert variables(SERVICES[name])["ROLLMESH_MESH"] == f"buffer:{port}"


def test_the_page_observes_the_mesh_and_asks_for_a_key() -> None:
    arguments = command_line(SERVICES["dashboard"])
    overrides_of(arguments)
    assert option(arguments, "--key-file") == "/run/secrets/page.key"
    [port] = SERVICES["dashboard"]["ports"]
    assert port.endswith(f":{option(arguments, '--port')}")


def test_each_service_mounts_its_own_secrets_and_none_the_token() -> None:
    owners: dict[str, list[str]] = {}
    for name, service in SERVICES.items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.endswith("-secrets") or source == "authority":
                owners.setdefault(source, []).append(name)
                assert name == "setup" or volume == f"{name}-secrets:/run/secrets:ro"
    assert owners.pop("authority") == ["setup"]
    assert all(found == ["setup", source.removesuffix("-secrets")] for source, found in owners.items())
    assert set(owners) == {name for name in COMPOSE["volumes"] if name.endswith("-secrets")}
    assert SERVICES["setup"]["network_mode"] == "none"


def test_generators_mount_no_data_and_only_the_buffer_sees_redis() -> None:
    assert SERVICES["generator"]["volumes"] == ["generator-secrets:/run/secrets:ro"]
    assert [name for name, service in SERVICES.items() if "store" in service.get("networks", [])] == ["redis", "buffer"]
    assert SERVICES["redis"]["networks"] == ["store"]
    # A front that is misused cannot harm the run folder.
    assert [name for name, service in SERVICES.items() if "data:/data" in service.get("volumes", [])] == [
        "prepare",
        "learner",
    ]
    buffer = configuration(SERVICES["buffer"]).buffer
    assert buffer.redis == "redis://rollmesh@redis:6379/0"
    assert str(buffer.redis_password_file) == "/run/secrets/redis.password"


def test_everything_of_the_user_is_mounted_read_only() -> None:
    for name, service in SERVICES.items():
        for volume in service.get("volumes", []):
            if volume.startswith("."):
                assert volume.endswith(":ro"), f"{name}: {volume}"


def test_what_crashes_comes_back_and_what_a_restart_does_not_mend_stays_away() -> None:
    for name, service in SERVICES.items():
        if name in MEMBERS:
            assert service["restart"] == "on-failure"
            assert service["environment"][PERMANENT_CODE_VARIABLE] == "0"
        elif name not in ("setup", "prepare"):
            assert service["restart"] == "unless-stopped"


def test_containers_give_the_learner_the_time_that_the_launcher_gives_it() -> None:
    assert SERVICES["learner"]["stop_grace_period"] == f"{LAST_S + _LEARNER_DRAIN_S:.0f}s"


def test_no_container_has_more_rights_than_it_needs() -> None:
    for name, service in SERVICES.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not {"privileged", "cap_add", "devices", "pid", "ipc"} & set(service), name
        assert ("ports" in service) == (name in ("dashboard", "grafana")), name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "only users of this host are let in"
    assert re.findall(r"^USER (\w+)$", DOCKERFILE, re.MULTILINE)[-1] == "rollmesh"
    assert SERVICES["redis"]["user"] == "redis"
    # It runs what is in its image on a volume that others read.
    assert SERVICES["prepare"]["network_mode"] == "none"


def test_redis_keeps_what_the_buffer_promises() -> None:
    assert "--appendfsync always" in SERVICES["redis"]["command"]
    assert "--maxmemory-policy noeviction" in SERVICES["redis"]["command"]


def test_each_service_that_stays_has_a_health_check() -> None:
    for name, service in SERVICES.items():
        assert ("healthcheck" in service) == (name not in ("setup", "prepare"))
        for item in service.get("healthcheck", {}).get("test", []):
            if item.startswith("/app/"):
                assert (DEPLOY / Path(item).relative_to("/app")).is_file()


def test_what_is_prepared_is_what_the_learner_reads() -> None:
    *_, module, option_name, out = SERVICES["prepare"]["command"].split()
    assert find_spec(module) is not None
    assert option_name == "--out"
    config = configuration(SERVICES["learner"])
    assert str(config.run.folder) == "/data/runs/demo"
    for path in (config.model.path, *(source.path for source in (*config.data.train, *(config.data.eval or ())))):
        assert str(path).startswith(f"{out}/")


@pytest.mark.parametrize("engine", get_args(EngineName))
def test_one_variable_chooses_the_engine(engine: str) -> None:
    services = composed(ROLLMESH_ENGINE=engine)["services"]
    assert services["generator"]["image"].endswith(f"-{engine}-cpu")
    assert services["generator"]["build"]["args"]["ENGINE"] == engine
    assert f" AS engine-{engine}\n" in DOCKERFILE
    for name in ("buffer", "learner"):
        rollout = configuration(services[name]).rollout
        assert rollout.engine == engine
        assert f"python3 -m venv {rollout.sglang.python.parents[1]} " in DOCKERFILE
        assert variables(services["generator"])["ROLLMESH_CODE"] == str(rollout.sglang.python)


def test_variables_and_their_defaults_are_all_in_one_file() -> None:
    used = {name for file in ("compose.yaml", DEVICES) for name in VARIABLE.findall((DEPLOY / file).read_text())}
    assert used | {"COMPOSE_PROFILES"} == set(settings())
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert settings()["ROLLMESH_VERSION"] == project["version"]
    profiles = {name for service in SERVICES.values() for name in service.get("profiles", [])}
    assert set(settings()["COMPOSE_PROFILES"].split(",")) <= profiles


def test_images_are_pinned_and_those_of_ours_say_what_they_hold() -> None:
    for service in SERVICES.values():
        assert re.search(r":v?\d+\.\d+[\w.-]*$", service["image"]), service["image"]
        if "build" in service:
            arguments = service["build"]["args"]
            assert service["image"].endswith(f"-{arguments['ENGINE']}-{arguments['DEVICE']}")
            assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
            assert all(f"ARG {name}" in DOCKERFILE for name in arguments)


def test_one_variable_gives_devices_to_services_that_compute() -> None:
    services = composed(ROLLMESH_DEVICE="cuda")["services"]
    given = {name: service["deploy"]["resources"] for name, service in services.items() if "deploy" in service}
    devices = {name: found["reservations"]["devices"][0]["device_ids"] for name, found in given.items()}
    assert devices == {"learner": ["0"], "generator": ["1"]}
    assert all(services[name]["image"].endswith("-cuda") for name in devices)
    assert services["generator"]["scale"] == 1, "replicas would share its device"
    assert SERVICES["generator"]["scale"] == 2
