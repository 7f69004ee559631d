"""The devices and hosts of a plan."""

import shutil
from pathlib import Path

import psutil
import pytest

from rollmesh.mesh.errors import ConfigError
from rollmesh.planning.cluster import GIB, MIB, parse_devices


@pytest.mark.parametrize(
    ("text", "name", "count", "memory"),
    [
        ("8xH100-80G", "H100-80G", 8, 81559 * MIB),
        ("8xh200", "H200-141G", 8, 143771 * MIB),
        ("A100", "A100-80G", 1, 81920 * MIB),
        ("4xA100-40G", "A100-40G", 4, 40960 * MIB),
        ("2xL40S-48G", "L40S-48G", 2, 46068 * MIB),
        ("1x4090-24G", "4090-24G", 1, 24564 * MIB),
        ("8xB200-180G", "B200-180G", 8, 183359 * MIB),
        ("8xMINE-96G", "MINE-96G", 8, 96 * GIB),
        ("1xCPU-24G", "CPU", 1, 24 * GIB),
    ],
)
def test_devices_are_read_by_name(text: str, name: str, count: int, memory: int) -> None:
    cluster = parse_devices(text, nodes=2)

    assert (cluster.name, cluster.count, cluster.memory) == (name, 2 * count, memory)
    assert cluster.cuda is (name != "CPU")


@pytest.mark.parametrize("text", ["8xMINE", "H100-90G", "0xH100", "2xCPU-8G", "many", "8 x H100", "1000000000xH100"])
def test_what_is_not_known_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_devices(text)
    assert refused.value.hint


def test_the_reserve_grows_with_the_processes_of_a_device() -> None:
    cluster = parse_devices("8xH100-80G")

    assert cluster.reserve(2) - cluster.reserve(1) == 1.5 * GIB
    assert "1.5 GiB" in cluster.describe_reserve()


def test_this_machines_memory_is_a_cpu_without_a_size() -> None:
    here = parse_devices("CPU")
    assert here.memory == here.host.memory == psutil.virtual_memory().total
    assert here.host.shm == shutil.disk_usage("/dev/shm").total
    assert "this machine's" in here.describe_host()
    named = parse_devices("1xCPU-24G", shm="64M")
    assert (named.host.memory, named.host.shm) == (24 * GIB, 64 * MIB)


@pytest.mark.parametrize(
    ("options", "memory", "shm"),
    [
        ({}, 1600 * GIB, 800 * GIB),
        ({"host_memory": "2T"}, 2048 * GIB, 1024 * GIB),
        ({"host_memory": "1.5TiB", "shm": "100g"}, 1536 * GIB, 100 * GIB),
        ({"shm": "64MB"}, 1600 * GIB, 64 * MIB),
    ],
)
def test_a_host_is_as_given_or_assumed(options: dict[str, str], memory: int, shm: int) -> None:
    host = parse_devices("8xH100-80G", 4, **options).host
    assert (host.memory, host.shm) == (memory, shm)
    assert ("assumed" in host.source) == (len(options) < 2)
    assert ("--host-memory" in host.source) == ("host_memory" not in options)
    assert ("--shm" in host.source) == ("shm" not in options)


def test_this_machines_devices_have_this_machines_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        (tmp_path / f"0000:0{number}:00.0").mkdir()
        about = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\n"
        (tmp_path / f"0000:0{number}:00.0" / "information").write_text(about)
    monkeypatch.setattr("rollmesh.planning.cluster._DRIVER", tmp_path)
    assert parse_devices("2xH100").host.memory == psutil.virtual_memory().total
    assert parse_devices("2xH100", host_memory="2T").host.memory == 2048 * GIB
    for others in ("8xH100", "2xA100"):
        assert "assumed" in parse_devices(others).host.source


def test_a_device_whose_name_begins_alike_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA RTX A1000\n")
    monkeypatch.setattr("rollmesh.planning.cluster._DRIVER", tmp_path)
    assert "assumed" in parse_devices("1xA100").host.source


@pytest.mark.parametrize("options", [{"host_memory": "much"}, {"shm": "64"}, {"host_memory": "-1T"}])
def test_a_host_of_no_size_is_refused(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="is no size") as refused:
        parse_devices("8xH100", **options)
    assert refused.value.hint


def test_the_memory_of_a_cpu_is_given_once() -> None:
    with pytest.raises(ConfigError, match="is its host's"):
        parse_devices("1xCPU-24G", host_memory="24G")
