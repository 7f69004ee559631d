"""Devices: every process its own, shared where the configuration says so, refused where there are too few."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.generators.engine_loading import sharing
from rollmesh.launcher.placement.devices import DevicePlan, assign_devices
from rollmesh.launcher.placement.preparation import Preparation
from rollmesh.launcher.placement.visible import VisibleDevices, visible_devices
from rollmesh.launcher.services import ServiceCatalogue
from rollmesh.mesh.config import Config, load_config
from rollmesh.mesh.config.derived.generator_places import devices_per_generator, generator_places
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.rpc.held_ports import HeldPorts
from rollmesh.mesh.runtime.threads import ThreadPlan

LEARNER = "placement.devices.learner"
GENERATORS = "placement.devices.generators"
SHARED = (f"{LEARNER}=[0]", f"{GENERATORS}=[[0]]")
COLLOCATED = "placement=collocated"
HYBRID = "placement=hybrid"


def config(*overrides: str) -> Config:
    return load_config({"model": {"path": "m"}, "data": {"train": "t.jsonl"}}, overrides)


def machine(devices: int) -> VisibleDevices:
    return VisibleDevices(tuple(str(number) for number in range(devices)), devices, devices)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 4), st.integers(1, 3), st.integers(1, 2), st.booleans())
def test_everybody_has_devices_of_his_own_or_the_run_is_refused(
    devices: int, ranks: int, replicas: int, tensor: int, copies: int, learner_on_cpu: bool
) -> None:
    asked = config(
        f"learner.ranks={ranks}",
        f"rollout.replicas={replicas}",
        "rollout.engine=vllm",
        f"rollout.vllm.tensor_parallel={tensor}",
        f"rollout.vllm.data_parallel={copies}",
        f"learner.device={'cpu' if learner_on_cpu else 'auto'}",
    )
    needed = (0 if learner_on_cpu else ranks) + replicas * tensor * copies
    if needed > devices:
        with pytest.raises(ConfigError, match=f"only {devices} are here"):
            assign_devices(asked, machine(devices))
        return
    plan = assign_devices(asked, machine(devices))
    given_out = [*plan.learner, *(number for each in plan.generators for number in each)]
    assert given_out == list(range(needed))
    assert [len(each) for each in plan.generators] == [tensor * copies] * replicas


def test_processes_see_their_own_devices_under_the_names_cuda_has_for_them() -> None:
    visible = VisibleDevices(("4", "GPU-five", "6", "7"), 4, 4)
    asked = config("learner.ranks=2", "rollout.replicas=2")
    with HeldPorts(asked.network.host) as ports:
        prepared = Preparation(assign_devices(asked, visible))
        catalogue = ServiceCatalogue(asked, Path("c.yaml"), ThreadPlan(2, 1, 1), prepared, ports, allow_changes=False)
    seen = {spec.name: spec.environment.get("CUDA_VISIBLE_DEVICES") for spec in catalogue.others("host:1")}
    assert seen == {"learner": "4,GPU-five", "generator-0": "6", "generator-1": "7", "reward": None}


def test_who_computes_on_the_cpu_sees_none() -> None:
    asked = config("learner.device=cpu")
    plan = assign_devices(asked, VisibleDevices(("0",), 0, 1))
    assert (plan.for_learner(), plan.for_generator(0)) == ({"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "0"})
    assert plan.describe() == "1 CUDA device(s): learner CPU; generator-0 0"


def test_a_machine_without_devices_is_left_as_it_is() -> None:
    plan = assign_devices(config("rollout.replicas=2"), VisibleDevices())
    assert plan.for_learner() == plan.for_generator(1) == {}
    assert plan.describe() == "no CUDA device: everything computes on the CPU"


def test_named_devices_are_taken_as_named_and_the_others_are_dealt_around_them() -> None:
    plan = assign_devices(config(f"{GENERATORS}=[[0], [2]]", "rollout.replicas=2", "learner.ranks=2"), machine(4))
    assert plan == DevicePlan(machine(4), (1, 3), ((0,), (2,)), ("generator-0", "generator-1"))


def test_one_device_for_all_has_to_be_said() -> None:
    with pytest.raises(ConfigError, match="the learner needs 1 CUDA device") as refused:
        assign_devices(config(), machine(1))
    assert "may name one twice" in refused.value.hint
    shared = (f"{LEARNER}=[0]", f"{GENERATORS}=[[0], [0]]", "rollout.replicas=2")
    assert assign_devices(config(*shared), machine(1)).generators == ((0,), (0,))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{LEARNER}=[0]", "learner.ranks=2"], rf"{LEARNER} names 1 device\(s\), 2 are needed"),
        ([f"{LEARNER}=[9]"], rf"{LEARNER}: no CUDA device 9, the last one here is 3"),
        ([f"{LEARNER}=[1, 1]", "learner.ranks=2"], "every rank needs a device of its own"),
        (["rollout.engine=vllm", "rollout.vllm.tensor_parallel=2", f"{GENERATORS}=[[1, 1]]"], "generator-0 would have"),
        ([f"{GENERATORS}=[[1], [2]]"], r"has 2 list\(s\), and there are 1 generator\(s\): generator-0"),
        ([f"{GENERATORS}=[[1, 2]]"], r"generator-0 has 2 device\(s\), 1 are needed"),
        ([*SHARED, "weights.transport=nccl"], "NCCL takes a device once"),
        (["learner.device=cpu", "weights.transport=nccl"], "the learner has no CUDA device"),
        (["rollout.device=cpu", "weights.transport=nccl"], "the generators have no CUDA device"),
        ([*SHARED, "rollout.engine=vllm"], "gpu_memory_utilization leaves too"),
        ([*SHARED, "rollout.engine=sglang"], "mem_fraction leaves too little"),
        ([COLLOCATED, "weights.transport=nccl"], "NCCL takes a device once"),
        ([COLLOCATED, "learner.device=cpu"], "the learner computes on the CPU, generators on CUDA: they share no"),
        ([COLLOCATED, "learner.ranks=5"], r"needs 5 CUDA device\(s\), but only 4 are here"),
        ([COLLOCATED, f"{GENERATORS}=[[1]]", f"{LEARNER}=[0]"], "which does not have device 1"),
        ([HYBRID, f"{GENERATORS}=[[0], [0]]"], "generator-0 has device 0 for itself, on which others take turns"),
        ([HYBRID, "rollout.replicas=4"], "only 4 are here"),
    ],
)
def test_what_does_not_fit_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assign_devices(config(*overrides), machine(4))


@pytest.mark.parametrize(
    ("replicas", "learner", "fits", "too_much"),
    [(1, 0, 0.5, 0.51), (2, 0, 0.25, 0.3), (3, 0, 0.16, 0.17), (2, 1, 0.45, 0.46)],
)
@pytest.mark.parametrize("key", ["vllm.gpu_memory_utilization", "sglang.mem_fraction"])
def test_engines_take_no_more_of_a_device_than_it_has_for_all(
    key: str, replicas: int, learner: int, fits: float, too_much: float
) -> None:
    shared = [f"rollout.replicas={replicas}", f"{GENERATORS}={[[0]] * replicas}", f"{LEARNER}=[{learner}]"]
    shared.append(f"rollout.engine={key.partition('.')[0]}")
    assert assign_devices(config(*shared, f"rollout.{key}={fits}"), machine(2)).generators == ((0,),) * replicas
    with pytest.raises(ConfigError, match=f"device 0, which has {replicas + (learner == 0)} users") as refused:
        assign_devices(config(*shared, f"rollout.{key}={too_much}"), machine(2))
    assert f"set it to {fits:g} or less" in refused.value.hint


def test_nccl_is_for_generators_elsewhere_too() -> None:
    assert not assign_devices(config("rollout.replicas=0", "weights.transport=nccl"), machine(1)).generators


@pytest.mark.parametrize("role", ["learner", "rollout"])
def test_cuda_that_is_not_there_is_refused_for_each_role(role: str) -> None:
    with pytest.raises(ConfigError, match=rf"{role}\.device is cuda, but torch finds no CUDA device"):
        assign_devices(
            config(f"{role}.device=cuda"), VisibleDevices(("0",), *((0, 1) if role == "learner" else (1, 0)))
        )


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [
        (["rollout.engine=hf"], 1),
        (["rollout.engine=vllm", "rollout.vllm.tensor_parallel=4"], 4),
        (["rollout.engine=vllm", "rollout.vllm.transfer=nccl"], 2),
        (["rollout.engine=sglang", "rollout.sglang.tensor_parallel=2", "rollout.sglang.data_parallel=2"], 4),
        (["rollout.engine=sglang", "rollout.sglang.tensor_parallel=2", "rollout.sglang.transfer=distributed"], 3),
        (["rollout.engine=sglang", "rollout.sglang.address=http://there:1"], 0),
    ],
)
def test_what_a_generator_needs(overrides: list[str], devices: int) -> None:
    assert devices_per_generator(config(*overrides).rollout) == devices


def test_each_interpreter_is_asked_for_what_its_torch_sees(tmp_path: Path) -> None:
    for name, says in (("learner", "echo 2"), ("rollout", "echo Welcome; echo 4"), ("broken", "exit 3")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{says}\n")
        (tmp_path / name).chmod(0o755)
    pythons = [f"{role}.python={tmp_path / role}" for role in ("learner", "rollout")]
    assert visible_devices(config(*pythons), {}) == VisibleDevices(("0", "1", "2", "3"), 2, 4)
    assert visible_devices(config(*pythons), {"CUDA_VISIBLE_DEVICES": "3, 5"}).names == ("3", "5")
    only = config(f"rollout.python={tmp_path / 'broken'}", "rollout.device=cpu", pythons[0])
    assert visible_devices(only, {}) == VisibleDevices(("0", "1"), 2, 0)
    with pytest.raises(ConfigError, match="broken does not say how many CUDA devices"):
        visible_devices(config(f"rollout.python={tmp_path / 'broken'}", pythons[0]), {})


@pytest.mark.parametrize(("key", "role", "value"), [(LEARNER, "learner", "[0]"), (GENERATORS, "rollout", "[[0]]")])
def test_named_devices_that_are_not_here_are_refused_and_not_replaced_by_the_cpu(
    key: str, role: str, value: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{key} names CUDA devices, and none can be used here"):
        assign_devices(config(f"{key}={value}"), VisibleDevices())
    assert not assign_devices(config(f"{key}={value}", f"{role}.device=cpu"), VisibleDevices()).learner


# ------------------------------------------------------------------------------------------------ shared in turns


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3), st.sampled_from(["collocated", "auto"]))
def test_generators_that_take_turns_have_the_learners_devices_each_once(
    ranks: int, replicas: int, tensor: int, mode: str
) -> None:
    asked = config(
        f"placement={mode}",
        f"learner.ranks={ranks}",
        f"rollout.replicas={replicas}",
        "rollout.engine=vllm",
        f"rollout.vllm.tensor_parallel={tensor}",
    )
    if replicas * tensor > ranks:
        with pytest.raises(ConfigError, match=f"do not fit the learner's {ranks}") as refused:
            assign_devices(asked, machine(6))
        fit = ranks // tensor
        nearest = f"rollout.replicas={fit}" if fit else f"learner.ranks={tensor}"
        assert nearest.replace("=", ": ") in refused.value.hint
        if fit:
            again = asked.model_copy(update={"rollout": asked.rollout.model_copy(update={"replicas": fit})})
            assert assign_devices(again, machine(6)).generators
        return
    plan = assign_devices(asked, machine(6))
    assert plan.learner == tuple(range(ranks))
    assert [number for each in plan.generators for number in each] == list(range(replicas * tensor))
    assert sharing(asked, "cuda") == 1


def test_an_engine_may_take_a_device_whole_in_its_turn_but_not_beside_another_one() -> None:
    whole = (COLLOCATED, "rollout.engine=vllm", "rollout.vllm.gpu_memory_utilization=0.9")
    assert assign_devices(config(*whole), machine(1)).generators == ((0,),)
    with pytest.raises(ConfigError, match="which has the context of a sleeping learner beside it") as refused:
        assign_devices(config(*whole, "rollout.vllm.gpu_memory_utilization=0.97"), machine(1))
    assert "set it to 0.95 or less" in refused.value.hint
    assert assign_devices(config(COLLOCATED, "rollout.engine=sglang"), machine(1)).generators == ((0,),)
    two = (*whole, "rollout.replicas=2", f"{GENERATORS}=[[0], [0]]")
    with pytest.raises(ConfigError, match="device 0, which has 2 users at the same time") as refused:
        assign_devices(config(*two), machine(1))
    assert "set it to 0.45 or less" in refused.value.hint
    halves = config(*two, "rollout.vllm.gpu_memory_utilization=0.45")
    assert assign_devices(halves, machine(1)).generators == ((0,), (0,))
    assert sharing(halves, "cuda") == 2


def test_generators_that_are_named_decide_on_the_learners_devices() -> None:
    plan = assign_devices(config(COLLOCATED, f"{GENERATORS}=[[2]]", "learner.ranks=2"), machine(4))
    assert (plan.learner, plan.generators) == ((0, 2), ((2,),))
    named = config(COLLOCATED, f"{LEARNER}=[3, 1]", "learner.ranks=2", "rollout.replicas=2")
    assert assign_devices(named, machine(4)).generators == ((3,), (1,))


def test_hybrid_has_generators_on_both() -> None:
    asked = config(HYBRID, "learner.ranks=2", "rollout.replicas=1")
    plan = assign_devices(asked, machine(3))
    assert plan == DevicePlan(machine(3), (0, 1), ((2,), (0,), (1,)), ("generator-0", "shared-0", "shared-1"))
    assert plan.describe() == "3 CUDA device(s): learner 0, 1; generator-0 2; shared-0 0; shared-1 1"
    assert [place.shares_devices for place in generator_places(asked)] == [False, True, True]
    assert sharing(asked, "cpu") == 3
    with pytest.raises(ConfigError, match=r"3 generator\(s\) with 1 device\(s\) each do not fit") as refused:
        assign_devices(config(HYBRID, "learner.ranks=2", "placement.shared_generators=3"), machine(3))
    assert "placement.shared_generators: 2 fit, or learner.ranks: 3" in refused.value.hint


@pytest.mark.parametrize("mode", ["split", "collocated", "hybrid", "auto"])
def test_a_cpu_needs_no_devices_in_any_placement(mode: str) -> None:
    plan = assign_devices(config(f"placement={mode}", "rollout.replicas=2"), VisibleDevices())
    assert plan.for_learner() == plan.for_generator(0) == {}
