"""Plans of both placements: the larger of the turns decides, the other placement is named where only it fits."""

from __future__ import annotations

import json

import pytest

from rollmesh.learner.builders import build_algorithm
from rollmesh.learner.engines.offload import SLAB_BYTES
from rollmesh.mesh.config.models import Config
from rollmesh.planning.cluster import GIB, parse_devices
from rollmesh.planning.host import RESTING
from rollmesh.planning.models import RunModels
from rollmesh.planning.plan import Plan, make_plan
from rollmesh.planning.report import lines, to_json
from rollmesh.planning.settings import with_settings
from rollmesh.planning.topologies.both import Topology, topologies, topology_lines
from tests.rollmesh.planning.plans import configured, found, over, planned

TWO, EIGHT = "2xH100-80G", "8xH100-80G"
VLLM = {"engine": "vllm", "replicas": 2}


def both(config: Config, devices: str = TWO) -> tuple[Topology, ...]:
    """Both placements alone, without the searches of a whole plan."""
    roles, models = build_algorithm(config).needs.roles, RunModels(config)

    def planner(changed: Config) -> Plan:
        return make_plan(changed, parse_devices(devices), roles, models)

    return topologies(config, planner(config), planner)


def test_the_larger_of_the_turns_decides_and_the_learner_rests_on_the_host() -> None:
    config = configured("qwen2.5-7b", rollout=VLLM, learner={"ranks": 2}, placement="collocated")
    plan = planned(config, TWO)
    assert plan.fits
    learner, generator, swap = plan.devices
    (actor,) = plan.roles
    assert plan.generator is not None
    assert learner.users == {"learner": plan.learner_peak, "sleeping generator": GIB}
    assert generator.users == {"generator": plan.generator.total}
    assert swap.users["weights and a bucket"] == plan.generator.weights + config.weights.bucket_bytes
    assert learner.reserve == plan.cluster.reserve(2), "the context of a process that sleeps stays"
    resting = plan.host[RESTING]
    assert 2 * actor.resting <= resting <= 2 * (actor.resting + 2 * SLAB_BYTES)
    # At the same time both do not fit: that is what turns are for.
    together = {"placement.mode": "split", "placement.devices.learner": [0, 1]}
    together |= {"placement.devices.generators": [[0], [1]], "rollout.vllm.gpu_memory_utilization": 0.4}
    beside = planned(with_settings(config, together), TWO)
    assert not beside.fits
    assert RESTING not in beside.host


def test_the_placement_that_fits_is_named_with_its_keys() -> None:
    config = configured("qwen2.5-7b", rollout=VLLM | {"replicas": 1}, learner={"ranks": 2})
    findings = found(config, TWO)
    text = "\n".join(lines(findings))
    keys = "--placement.mode=collocated --rollout.replicas=2"
    assert "placement split: does NOT fit: the learner needs 2 CUDA device(s) and 1 generator(s) 1 each" in text
    assert f"placement collocated ({keys}): fits" in text
    assert f"only placement collocated fits: add {keys}" in text
    assert "no device left to generators: only in turns (placement: collocated) do they have any" in text
    split, collocated = json.loads(json.dumps(to_json(findings)))["topologies"]
    assert (split["fits"], collocated["fits"]) == (False, True)
    assert planned(with_settings(config, collocated["settings"]), TWO).fits

    assert [topology.mode for topology in both(with_settings(config, collocated["settings"]))] == [
        "collocated",
        "split",
    ]


def test_named_devices_are_those_of_one_placement() -> None:
    named = {"devices": {"learner": [0], "generators": [[1]]}}
    split, collocated = both(configured("qwen3-0.6b", rollout=VLLM | {"replicas": 1}, placement=named))
    assert split.plan.fits
    assert collocated.plan.fits
    expected = {"placement.devices.learner": None, "placement.devices.generators": None}
    in_turns = {"placement.mode": "collocated", "learner.ranks": 2, "rollout.replicas": 2}
    assert collocated.settings == expected | in_turns
    assert not both(configured("qwen3-0.6b")), "without generators there is nothing to choose"


def test_in_turns_the_learner_has_the_generators_devices_too() -> None:
    split = configured("qwen3-0.6b", rollout=VLLM | {"replicas": 6}, learner={"ranks": 2})
    collocated = both(split, EIGHT)[1]
    assert collocated.settings == {"placement.mode": "collocated", "learner.ranks": 8, "rollout.replicas": 8}
    assert collocated.plan.fits
    back = both(with_settings(split, collocated.settings), EIGHT)[1]
    assert back.settings == {"placement.mode": "split", "learner.ranks": 1, "rollout.replicas": 7}, "as few as it needs"


def test_a_proposal_fills_the_devices_and_idle_ones_are_counted() -> None:
    few = configured("qwen3-0.6b", rollout=VLLM | {"replicas": 1})
    assert [topology.verdict for topology in both(few, EIGHT)] == ["fits, 6 of 8 devices stay idle", "fits"]
    in_turns = configured("qwen2.5-7b", rollout=VLLM | {"replicas": 1}, learner={"ranks": 1}, placement="collocated")
    assert [topology.settings for topology in both(in_turns, EIGHT)[1:]] == [
        {"learner.ranks": 8, "rollout.replicas": 8},
        {"placement.mode": "split", "learner.ranks": 2, "rollout.replicas": 6},
    ]
    assert both(few, "6xH100-80G")[1].settings == {
        "placement.mode": "collocated",
        "learner.ranks": 6,
        "rollout.replicas": 6,
    }
    with_two = VLLM | {"replicas": 1, "vllm": {"tensor_parallel": 2}}
    (apart, *_) = both(configured("qwen2.5-7b", rollout=with_two, learner={"ranks": 3}), EIGHT)
    assert apart.verdict == "fits, 3 of 8 devices stay idle"


def test_placements_come_first_and_nothing_says_the_contrary_of_the_one_that_fits() -> None:
    text = list(lines(found(configured("qwen2.5-1.5b", rollout=VLLM | {"replicas": 1}), "1xH100-80G")))
    first = next(index for index, line in enumerate(text) if line.startswith("placement split: does NOT fit"))
    assert text[first + 1 : first + 4] == [
        "placement collocated (--placement.mode=collocated): fits",
        "only placement collocated fits: add --placement.mode=collocated",
        "DOES NOT FIT as configured:",
    ]
    assert "no switch that saves memory makes it fit" not in text


@pytest.mark.parametrize("mode", ["split", "collocated"])
def test_numbers_of_ranks_that_fit_are_found_for_either_placement(mode: str) -> None:
    config = configured("qwen2.5-7b", rollout=VLLM | {"replicas": 1}, placement=mode)
    two = "\n".join(topology_lines(both(config)))
    in_turns = "--learner.ranks=2 --rollout.replicas=2"
    assert f"placement {mode}: does NOT fit: learner" in two
    if mode == "split":
        assert two.endswith(f"only placement collocated fits: add --placement.mode=collocated {in_turns}")
    else:
        assert f"placement collocated ({in_turns}): fits" in two
        assert "placement split (--placement.mode=split): does NOT fit: learner: " in two
    eight = both(config, EIGHT)
    assert [topology.plan.fits for topology in eight] == [False, True, True]
    apart = next(topology for topology in eight[1:] if topology.mode == "split")
    assert apart.settings.get("learner.ranks") == 2
    assert "only placement" not in "\n".join(topology_lines(eight))


def test_a_model_that_megatron_has_to_divide_is_planned_as_the_smallest_layout_divides_it() -> None:
    rollout = VLLM | {"replicas": 1, "vllm": {"tensor_parallel": 4}}
    findings = found(configured("qwen3-30b-a3b", rollout=rollout, learner={"engine": "megatron"}), EIGHT)
    assert findings.search.proposal is not None
    collocated = findings.topologies[-1]
    assert collocated.plan.fits
    divided = {key: value for key, value in findings.search.proposal.settings.items() if "parallel" in key}
    assert divided
    assert divided.items() <= collocated.settings.items()
    assert (collocated.settings["learner.ranks"], collocated.settings["rollout.replicas"]) == (8, 2)


def test_an_obstacle_is_whole_and_has_sizes_that_can_be_read() -> None:
    config = configured("qwen3-0.6b", rollout=VLLM | {"replicas": 1}, weights={"transport": "shm"})
    roles, models = build_algorithm(config).needs.roles, RunModels(config)
    plan = make_plan(config, parse_devices(TWO, shm="64M"), roles, models)
    needed = "shared memory (/dev/shm) of the learner's node: 4.4 GiB are needed, the reserve included, and there are"
    assert Topology("split", {}, plan).verdict == f"does NOT fit: {needed} 64.0 MiB"


def test_on_a_cpu_no_device_is_counted() -> None:
    text = "\n".join(lines(found(configured("qwen3-0.6b", rollout={"replicas": 1}), "1xCPU-64G")))
    assert "smallest layout: " in text
    assert "left to generators" not in text


def test_more_ranks_take_no_devices_from_generators_in_turns() -> None:
    config = configured("qwen2.5-7b", rollout=VLLM | {"replicas": 1}, placement="collocated")
    text = "\n".join(lines(found(config, TWO)))
    assert "then it fits: more devices, which generators may have in their turn" in text


def test_a_placement_that_fits_with_no_number_of_ranks_names_them() -> None:
    config = configured("qwen2.5-32b", rollout=VLLM | {"vllm": {"tensor_parallel": 2}, "replicas": 1})
    *_, collocated = both(config)
    assert not collocated.plan.fits
    assert collocated.verdict.startswith("does NOT fit: learner in its turn: "), "one rank has too few for an engine"
    one = configured("qwen2.5-7b", rollout=VLLM | {"replicas": 1}, placement="collocated")
    split = both(one, "1xH100-80G")[1]
    assert split.settings == {"placement.mode": "split"}
    assert split.verdict.endswith("but only 1 are here"), "no number of ranks leaves a device to a generator"
    four = both(configured("qwen2.5-72b", rollout=VLLM), "4xH100-80G")[1]
    assert "does NOT fit, nor with learner.ranks 1, 2: " in four.verdict


def test_hybrid_has_devices_of_both_kinds() -> None:
    rollout = VLLM | {"replicas": 1}
    config = configured("qwen3-0.6b", rollout=rollout, learner={"ranks": 2}, placement="hybrid")
    plan = planned(config, "3xH100-80G")
    assert plan.fits
    assert [use.name for use in plan.devices] == [
        "learner in its turn",
        "generator in its turn",
        "both in a swap",
        "generator",
    ]
    assert plan.placement.generators == 3
    assert planned(config, TWO).placement.problems


@pytest.mark.parametrize(("mode", "with_learner"), [("collocated", 0), ("hybrid", 2)])
def test_on_a_cpu_the_larger_turn_decides_and_state_rests_in_files(mode: str, with_learner: int) -> None:
    rollout = {"engine": "hf", "replicas": 2, "hf": {"kv_cache_gib": 1.0}}
    config = configured("qwen3-0.6b", rollout=rollout, placement=mode)
    plan = planned(config, "1xCPU-64G")
    learner, generators = plan.devices
    assert plan.generator is not None
    awake = learner.users.get(f"{with_learner} generator(s)", 0)
    assert awake == with_learner * plan.generator.total
    assert "learner, 1 rank(s)" in learner.users
    assert "learner, 1 rank(s)" not in generators.users
    assert any(notice.startswith("the learner rests in files, ") for notice in plan.notices)


def test_generators_in_turns_are_on_the_learners_nodes() -> None:
    learner = {"ranks": 16, "distributed": over(2)}
    config = configured("qwen3-30b-a3b", rollout=VLLM | {"replicas": 16}, learner=learner, placement="collocated")
    placement = planned(config, "8xH100-80G", 4).placement
    assert (placement.on_learner_nodes, placement.elsewhere, placement.in_turns) == (8, 0, 8)
    assert not placement.problems
