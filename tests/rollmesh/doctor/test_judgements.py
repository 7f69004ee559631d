"""Decisions about facts that a machine of the tests does not have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from packaging.specifiers import SpecifierSet

from rollmesh.doctor.before.addresses import judge_proxies
from rollmesh.doctor.before.devices import DeviceFacts, TorchBuild
from rollmesh.doctor.before.devices import judge as judge_devices
from rollmesh.doctor.before.host import HostFacts
from rollmesh.doctor.before.host import judge as judge_host
from rollmesh.doctor.before.redis_server import RedisFacts
from rollmesh.doctor.before.redis_server import judge as judge_redis
from rollmesh.doctor.before.space import Disk, Need, judge_disk, judge_memory
from rollmesh.doctor.before.versions import Installed
from rollmesh.doctor.before.versions import judge as judge_versions
from rollmesh.doctor.findings import Severity

_GIB = 1 << 30
_WELL = {
    "redis_version": "7.2.4",
    "role": "master",
    "maxmemory_policy": "noeviction",
    "maxmemory": "0",
    "used_memory": "1000",
    "aof_enabled": "1",
}


@pytest.mark.parametrize(
    ("changed", "facts", "said", "severity"),
    [
        ({"redis_version": "6.0.16"}, {}, "6.2 or later", Severity.PROBLEM),
        ({"role": "slave"}, {}, "takes no writes", Severity.PROBLEM),
        ({}, {"seconds": 0.2}, "200 ms", Severity.WARNING),
        ({}, {"ahead_s": -130.0}, "130.0 s slow", Severity.WARNING),
        ({}, {"settings": {"appendfsync": "everysec"}}, "everysec", Severity.NOTE),
    ],
)
def test_a_redis_that_does_not_suit(changed, facts, said: str, severity: Severity) -> None:
    found = list(judge_redis(RedisFacts({**_WELL, **changed}, **facts), _GIB))
    assert [one.severity for one in found if said in one.what] == [severity], found


def test_a_redis_that_suits() -> None:
    found = judge_redis(RedisFacts(_WELL, {"appendfsync": "always"}), _GIB)
    assert {one.severity for one in found} == {Severity.OK}


_BUILD = TorchBuild("learner.python", "2.13.0+cu128", "12.8", 8)
_DEVICES = DeviceFacts(True, "12.8", [_BUILD], [(0, 80 * _GIB)] * 8, wants_cuda=True)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (replace(_DEVICES, builds=[replace(_BUILD, cuda=None)]), "without CUDA"),
        (replace(_DEVICES, builds=[replace(_BUILD, cuda="13.0")]), "runs CUDA 12.8 at most"),
        (replace(_DEVICES, builds=[replace(_BUILD, devices=0)]), "sees no device"),
        (replace(_DEVICES, used=[(0, 80 * _GIB), (40 * _GIB, 80 * _GIB)]), "device 1: 40.0 of 80.0 GiB"),
    ],
)
def test_devices_that_do_not_suit(facts: DeviceFacts, said: str) -> None:
    (finding,) = (one for one in judge_devices(facts) if one.severity in (Severity.WARNING, Severity.PROBLEM))
    assert said in finding.what
    assert finding.remedy


def test_a_newer_minor_version_of_cuda_runs_on_an_older_driver() -> None:
    found = judge_devices(replace(_DEVICES, driver_cuda="12.4"))
    assert {one.severity for one in found} == {Severity.NOTE}


@pytest.mark.parametrize(
    ("environment", "hosts", "severity"),
    [
        ({}, ["10.1.2.3"], Severity.OK),
        ({"http_proxy": "p:1"}, ["10.1.2.3"], Severity.PROBLEM),
        ({"http_proxy": "p:1", "no_proxy": "10.0.0.0/8"}, ["10.1.2.3"], Severity.OK),
        ({"https_proxy": "p:1", "no_proxy": ".cluster.local"}, ["buffer.rl.svc.cluster.local"], Severity.OK),
        ({"grpc_proxy": "p:1", "no_grpc_proxy": "a", "no_proxy": "*"}, ["10.1.2.3"], Severity.PROBLEM),
        ({"http_proxy": "p:1", "no_proxy": "*"}, ["10.1.2.3"], Severity.OK),
        ({"http_proxy": "p:1"}, [], Severity.WARNING),
    ],
)
def test_proxies_as_grpc_reads_them(environment: dict[str, str], hosts: list[str], severity: Severity) -> None:
    (finding,) = judge_proxies(environment, hosts)
    assert finding.severity is severity, finding


@pytest.mark.parametrize(
    ("version", "fits"),
    [("2.13.0+cpu", True), ("2.11.0", True), ("2.12.0rc1", True), ("2.10.1", False), ("odd", False)],
)
def test_builds_and_candidates_are_the_version_that_they_are_of(version: str, *, fits: bool) -> None:
    installed = Installed("learner.python", "/python", "3.11.7", {"torch": version})
    found = list(judge_versions(installed, {"torch": SpecifierSet(">=2.11"), "python": SpecifierSet(">=3.11")}))
    assert (found[0].severity is Severity.OK) is fits, found


def test_an_engines_own_environment_needs_the_engine_alone() -> None:
    required = {"torch": SpecifierSet(">=2.11"), "sglang": SpecifierSet(">=0.5.23,<0.5.24")}
    installed = Installed("rollout.sglang.python", "/python", "3.11.7", {"torch": "2.9", "sglang": "0.5.20"}, False)
    (finding,) = judge_versions(installed, required)
    assert "sglang 0.5.20" in finding.what
    assert "make sglang" in finding.remedy


def test_few_open_files_are_too_few_whatever_runs() -> None:
    (finding,) = judge_host(HostFacts(open_files=200, cores=8, members=1, fronts=1, threads=8))
    assert finding.severity is Severity.PROBLEM
    assert "ulimit -Hn" in finding.remedy


def test_shared_memory_may_be_small_where_weights_can_take_another_way() -> None:
    need = Need("shared memory", 8 * _GIB, _GIB, required=False)
    (finding,) = judge_memory([need], "auto")
    assert finding.severity is Severity.WARNING
    assert "--shm-size=8g" in finding.remedy


@pytest.mark.parametrize(
    ("free", "severity"), [(4, Severity.PROBLEM), (30, Severity.PROBLEM), (60, Severity.WARNING), (90, Severity.OK)]
)
def test_checkpoints_have_to_fit_and_what_redis_writes_should(free: int, severity: Severity) -> None:
    disk = Disk("/runs", free * _GIB, 1000 * _GIB, checkpoint=10 * _GIB, kept=5, rest=20 * _GIB)
    (finding,) = judge_disk(disk, 2)
    assert finding.severity is severity, finding


def test_checkpoints_that_are_there_already_need_no_more_room() -> None:
    disk = Disk("/runs", 70 * _GIB, 1000 * _GIB, checkpoint=10 * _GIB, kept=5, rest=20 * _GIB, present=50 * _GIB)
    (finding,) = judge_disk(disk, 2)
    assert finding.severity is Severity.OK
