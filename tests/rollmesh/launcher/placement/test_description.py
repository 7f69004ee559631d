"""Placements in words: who takes turns, and what has no effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.cli.explanations.explain import explain
from rollmesh.launcher.placement.description import core_notices, describe_turns, placement_notices, rest_notices
from rollmesh.launcher.placement.devices import DevicePlan, assign_devices
from rollmesh.launcher.placement.visible import VisibleDevices
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.errors import ConfigError


def config(*overrides: str) -> Config:
    return load_config({"model": {"path": "m"}, "data": {"train": "t.jsonl"}}, overrides)


ONE, TWO = (VisibleDevices(tuple(map(str, range(count))), count, count) for count in (1, 2))
NONE = VisibleDevices()


@pytest.mark.parametrize(
    ("overrides", "seen", "text"),
    [
        ([], TWO, "placement split: generators and learner have devices of their own, and work at the same time"),
        (
            ["rollout.device=cpu"],
            ONE,
            "placement split: generators and learner have devices of their own, and work at the same time",
        ),
        (
            ["placement.devices.learner=[0]", "placement.devices.generators=[[0]]"],
            ONE,
            "placement split: generators and learner share device(s) 0, and work at the same time",
        ),
        (
            [],
            NONE,
            "placement split: generators and learner share the cores and the memory of this machine, and work at the "
            "same time",
        ),
        (
            ["placement=colocate", "learner.ranks=2", "rollout.replicas=2", "buffer.max_staleness=3"],
            TWO,
            "placement collocated: the learner and generator-0, generator-1 take turns on the same devices, up to 3 "
            "batch(es) a turn",
        ),
        (
            ["placement=hybrid", "placement.batches_per_turn=1"],
            NONE,
            "placement hybrid: the learner and shared-0 take turns with the same cores and memory, up to 1 batch(es) a "
            "turn; generator-0 always generates",
        ),
    ],
)
def test_a_run_says_who_takes_turns_and_with_what(overrides: list[str], seen: VisibleDevices, text: str) -> None:
    asked = config(*overrides)
    assert describe_turns(asked, assign_devices(asked, seen)) == text


def test_explain_says_the_placement_of_this_machine() -> None:
    asked = config("learner.device=cpu", "rollout.device=cpu")
    assert describe_turns(asked, DevicePlan()) in list(explain(asked))
    assert "devices of their own" in describe_turns(asked, None), "of another machine nothing is known"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["placement.shared_generators=2"], "placement.shared_generators"),
        (["placement=collocated", "placement.trial_batches=2"], "placement.trial_batches"),
        (["placement.release=process"], "placement.release"),
        (["placement.step_timeout_s=5"], "placement.step_timeout_s"),
        (["placement.devices.learner=[0]", "learner.device=cpu"], "placement.devices.learner"),
        (["placement.devices.generators=[[0]]", "rollout.device=cpu"], "placement.devices.generators"),
    ],
)
def test_settings_without_effect_are_named(overrides: list[str], key: str) -> None:
    asked = config(*overrides)
    (notice,) = placement_notices(asked, assign_devices(asked, VisibleDevices()))
    assert notice.startswith(f"without effect: {key}. ")


def test_hybrid_without_generators_of_its_own_is_said_to_be_collocated() -> None:
    (notice,) = placement_notices(config("placement=hybrid", "rollout.replicas=0"), None)
    assert "all generators that start here take turns, as with placement: collocated" in notice


def test_more_generators_than_cores_are_told() -> None:
    many = config("placement=collocated", "rollout.replicas=12")
    (notice,) = core_notices(many, DevicePlan(), 2)
    assert notice.startswith("12 generators share 2 core(s): ")
    assert not list(core_notices(many, DevicePlan(), 12))
    assert not list(core_notices(many, DevicePlan(generators=((0,),) * 12), 2))


def test_named_devices_that_are_not_here_are_refused_and_not_called_without_effect() -> None:
    text = list(explain(config("placement.devices.learner=[31]", "learner.device=cuda")))
    assert any(line.startswith("devices: not enough for this run on this machine") for line in text)
    assert not any("without effect" in line for line in text)


def test_devices_that_would_be_idle_are_named_with_the_number_that_uses_them() -> None:
    asked = config("placement=collocated", "learner.ranks=4", "rollout.replicas=1")
    seen = VisibleDevices(("0", "1", "2", "3"), 4, 4)
    (notice,) = placement_notices(asked, assign_devices(asked, seen))
    assert notice == "idle while generators have the devices: 1, 2, 3. rollout.replicas: 4 would use them"
    assert not list(placement_notices(config("placement=collocated"), DevicePlan()))


@pytest.mark.parametrize(
    ("release", "on_cuda", "told"), [("auto", False, True), ("auto", True, False), ("process", True, True)]
)
def test_engines_that_end_in_each_turn_are_told(release: str, on_cuda: bool, told: bool) -> None:
    asked = config("placement=collocated", f"placement.release={release}", "rollout.engine=vllm")
    seen = VisibleDevices(("0",), 1, 1) if on_cuda else VisibleDevices()
    notices = list(placement_notices(asked, assign_devices(asked, seen)))
    assert any("processes end in each turn" in notice for notice in notices) == told


@pytest.mark.skipif(not Path("/dev/shm").is_mount(), reason="without a file system in memory")
def test_a_rest_that_frees_nothing_is_told() -> None:
    rests = ["placement=collocated", "learner.device=cpu", "placement.rest_dir=/dev/shm/rest"]
    (notice,) = rest_notices(config(*rests), DevicePlan())
    assert "/dev/shm/rest take memory" in notice
    assert not list(rest_notices(config(*rests, "placement=split"), DevicePlan()))
    assert not list(rest_notices(config(*rests), DevicePlan(learner=(0,)))), "it rests in pinned memory"


def test_an_engine_without_processes_cannot_end_them() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine: hf has none of its own to end; leave it at auto"):
        config("placement=hybrid", "placement.release=process")
    foreign = ("rollout.engine=sglang", "rollout.sglang.address=http://there:1")
    with pytest.raises(ConfigError, match=r"an engine at rollout\.sglang\.address has none"):
        config("placement=collocated", "placement.release=process", *foreign)
    assert config("placement.release=process").placement.release == "process", "it has no effect, and is named"
