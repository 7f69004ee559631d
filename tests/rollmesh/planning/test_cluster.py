"""The devices of a plan."""

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


@pytest.mark.parametrize("text", ["8xMINE", "H100-90G", "0xH100", "2xCPU-8G", "many", "8 x H100"])
def test_what_is_not_known_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_devices(text)
    assert refused.value.hint


def test_the_reserve_grows_with_the_processes_of_a_device() -> None:
    cluster = parse_devices("8xH100-80G")

    assert cluster.reserve(2) - cluster.reserve(1) == 1.5 * GIB
    assert "1.5 GiB" in cluster.describe_reserve()


def test_this_machines_memory_is_a_cpu_without_a_size() -> None:
    assert parse_devices("CPU").memory > GIB
