"""The placements that are compared on a machine, and those that are left out."""

from __future__ import annotations

import pytest

from rollmesh.launcher.placement.description import placement_notices
from rollmesh.launcher.placement.visible import VisibleDevices
from rollmesh.launcher.trials.candidates import candidates
from rollmesh.launcher.trials.estimates import Division
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.errors import ConfigError


def asked(*overrides: str) -> Config:
    return load_config(
        {"model": {"path": "m"}, "data": {"train": "t.jsonl"}},
        ["placement=auto", "placement.trial_batches=2", *overrides],
    )


def cuda(count: int) -> VisibleDevices:
    return VisibleDevices(tuple(map(str, range(count))), count, count)


def test_two_cores_have_one_ratio() -> None:
    found, left_out = candidates(asked(), VisibleDevices(), 2)
    assert {name: one.division for name, one in found.items()} == {
        "collocated": Division("collocated", 2, 2),
        "split": Division("split", 1, 1),
        "hybrid": Division("hybrid", 1, 1),
    }
    assert left_out == []
    assert list(placement_notices(found["split"].config, found["split"].devices)) == []


def test_cores_are_divided_in_several_ratios_unless_threads_are_given() -> None:
    found, _ = candidates(asked("rollout.replicas=2"), VisibleDevices(), 64)
    ratios = {one.division.learner for one in found.values() if one.division.mode == "split"}
    assert ratios == {8, 16, 24, 32, 40, 48, 56}
    few = found["split, 8 of 64 cores for the learner"]
    assert (few.threads.learner, few.threads.generator) == (8, 28)
    given, _ = candidates(asked("resources.learner_threads=4"), VisibleDevices(), 64)
    assert set(given) == {"collocated", "split", "hybrid"}


def test_devices_are_divided_in_ranks_and_generators() -> None:
    found, left_out = candidates(asked("learner.ranks=4", "rollout.replicas=4"), cuda(4), 8)
    ratios = {
        (one.config.learner.ranks, one.config.rollout.replicas)
        for one in found.values()
        if one.config.placement.mode == "split"
    }
    assert ratios == {(1, 3), (2, 2), (3, 1)}
    assert [reason.partition(":")[0] for reason in left_out] == ["split", "hybrid"]
    for one in found.values():
        assert one.devices.learner
        assert one.division.learner == one.config.learner.ranks


def test_one_device_is_shared_in_turns_or_not_at_all() -> None:
    found, left_out = candidates(asked(), cuda(1), 8)
    assert set(found) == {"collocated"}
    assert len(left_out) == 2


def test_ranks_that_divide_the_model_stay_together() -> None:
    divided = ("learner.engine=megatron", "learner.parallel.tp=2")
    found, _ = candidates(asked("learner.ranks=4", "rollout.replicas=4", *divided), cuda(4), 8)
    assert {one.config.learner.ranks for one in found.values()} == {4, 2}


def test_a_run_without_generators_here_has_nothing_to_try() -> None:
    found, left_out = candidates(asked("rollout.replicas=0"), VisibleDevices(), 4)
    assert set(found) == {"collocated"}
    assert "started by hand" in left_out[0]


def test_a_run_that_fits_in_no_placement_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 CUDA device"):
        candidates(asked("learner.ranks=2"), cuda(1), 4)
