"""Plans of several nodes: what stands where, proposals that start, and the memory of hosts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rollmesh.planning.cluster import GIB, parse_devices
from rollmesh.planning.memory_uses import SHM
from rollmesh.planning.placement import RENDEZVOUS
from rollmesh.planning.report import lines, to_json
from rollmesh.planning.settings import with_settings
from tests.command import Command
from tests.rollmesh.planning.plans import configured, found, over, planned

H100 = "8xH100-80G"


def test_a_node_has_no_more_ranks_than_devices() -> None:
    crowded = configured("qwen2.5-7b", learner={"ranks": 32})
    (problem,) = planned(crowded, H100, 8).problems

    assert "32 ranks on a node of 8 devices" in problem
    assert "--learner.distributed.nodes=4 --learner.distributed.rendezvous=HOST:29500" in problem
    assert planned(configured("qwen2.5-7b", learner={"ranks": 32, "distributed": over(4)}), H100, 8).fits
    (problem,) = planned(configured("qwen2.5-7b", learner={"ranks": 4, "distributed": over(4)}), H100, 2).problems
    assert "learner.distributed.nodes is 4" in problem


def test_an_engine_is_on_one_node() -> None:
    def divided(parts: int) -> tuple[str, ...]:
        rollout = {"engine": "vllm", "replicas": 1, "vllm": {"tensor_parallel": parts}}
        return planned(configured("qwen2.5-7b", rollout=rollout), H100, 8).placement.problems

    assert divided(8) == ()
    (problem,) = divided(16)
    assert "engine takes 16 devices of one node, which has 8" in problem


def test_generators_fill_the_other_nodes_and_then_what_ranks_leave() -> None:
    def place(replicas: int, parts: int = 3, ranks: int = 5) -> tuple[int, int, tuple[str, ...]]:
        rollout = {"engine": "vllm", "replicas": replicas, "vllm": {"tensor_parallel": parts}}
        plan = planned(configured("qwen2.5-7b", rollout=rollout, learner={"ranks": ranks}), H100, 3)
        return plan.placement.on_learner_nodes, plan.placement.elsewhere, plan.problems

    # Two to each of two nodes, with devices 7 and 8 unused; one next to five ranks.
    assert place(3) == (0, 2, ())
    assert place(4) == (0, 2, ())
    assert place(5) == (1, 2, ())
    on_learner_nodes, elsewhere, problems = place(6)
    assert (on_learner_nodes, elsewhere) == (2, 2)
    assert "on a node of the learner" in problems[0]


@pytest.mark.parametrize(("learner_nodes", "ranks_there"), [(1, 8), (2, 4), (8, 1)])
def test_a_host_holds_what_its_own_ranks_and_generators_keep(learner_nodes: int, ranks_there: int) -> None:
    learner = {"ranks": 8, "distributed": over(learner_nodes)}
    rollout = {"engine": "vllm", "replicas": 16, "vllm": {"tensor_parallel": 2}}
    plan = planned(configured("qwen2.5-7b", learner=learner, rollout=rollout), H100, 8)
    version = 2 * plan.roles[0].setup.shape.elements

    assert plan.host["copy for checkpoints"] == ranks_there * plan.roles[0].resting
    hosts = {use.name: use for use in plan.hosts}
    if learner_nodes < 8:
        # Four fit on a node, and as few as possible stand there.
        each = -(-16 // (8 - learner_nodes))
        assert "version for vLLM's workers" not in plan.host
        assert hosts["host of generators"].users == {
            "version received": each * version,
            "version for vLLM's workers": each * version,
        }
    else:
        assert plan.host["version for vLLM's workers"] == 2 * version
        assert "host of generators" not in hosts


@pytest.mark.parametrize(("model", "ranks", "nodes"), [("llama-3-70b", 32, 4), ("qwen3-30b-a3b", 8, 1)])
def test_what_is_proposed_can_be_pasted(model: str, ranks: int, nodes: int) -> None:
    config = configured(model)
    findings = found(config, H100, 8)
    proposal = findings.search.proposal
    assert proposal is not None
    assert (proposal.ranks, proposal.nodes) == (ranks, nodes)
    assert proposal.settings.get("learner.distributed.nodes", 1) == nodes
    assert planned(with_settings(config, proposal.settings), H100, 8).fits
    text = "\n".join(lines(findings))
    assert (f"--learner.distributed.rendezvous={RENDEZVOUS}" in text) == (nodes > 1)
    assert ("HOST stands for the address of node 0" in text) == (nodes > 1)
    assert ("--security.allow_insecure=true" in text) == (nodes > 1)
    # Offered switches start too.
    for saving in findings.savings:
        assert not planned(with_settings(config, saving.settings), H100, 8).placement.problems


def test_switches_are_not_listed_where_none_of_them_helps() -> None:
    config = configured("llama-3-70b", learner={"ranks": 1}, placement={"devices": {"learner": [9]}})
    findings = found(config, H100, 1)
    assert findings.savings
    text = "\n".join(lines(findings))
    assert "placement.devices.learner: no CUDA device 9" in text
    assert "no switch that saves memory makes it fit" in text
    assert "not enough by itself" not in text


def test_a_rendezvous_that_is_known_stays() -> None:
    config = configured("llama-3-70b", learner={"ranks": 4, "distributed": over(2)})
    findings = found(config, H100, 8)
    assert findings.search.proposal is not None
    assert findings.search.proposal.settings["learner.distributed.nodes"] == findings.search.proposal.nodes
    assert "learner.distributed.rendezvous" not in findings.search.proposal.settings


def test_a_host_without_room_does_not_fit_and_more_nodes_or_less_offloading_help() -> None:
    memory = {"offload_optimizer": True, "offload_activations": True}
    config = configured("qwen3-30b-a3b", learner={"ranks": 8, "memory": memory})
    roomy, small = (found(config, H100, 2, host_memory=size) for size in ("2T", "768G"))

    assert roomy.plan.fits
    assert roomy.plan.cluster.host.memory == 2048 * GIB
    (problem,) = small.plan.problems
    assert problem.startswith("host of the learner: ")
    assert "there are 768.0" in problem
    assert all(use.fits for use in small.plan.devices)
    offered = [saving.settings for saving in small.savings]
    assert {"learner.memory.offload_optimizer": False} in offered
    assert {"learner.distributed.nodes": 2, "learner.distributed.rendezvous": RENDEZVOUS} in offered
    assert not any(False in saving.settings.values() for saving in roomy.savings)
    text = "\n".join(lines(small))
    assert "does NOT fit" in text
    assert "DOES NOT FIT as configured:\n  host of the learner" in text


def test_the_proposal_is_spread_over_more_nodes_where_a_host_is_small() -> None:
    proposals = [
        found(configured("qwen3-30b-a3b"), H100, 4, host_memory=size).search.proposal for size in ("1T", "640G")
    ]
    assert None not in proposals
    assert [(each.ranks, each.nodes) for each in proposals if each is not None] == [(8, 1), (8, 2)]


def test_shared_memory_is_compared_and_needed_only_where_nothing_else_is_allowed() -> None:
    # Four versions of 1.2 GB.
    texts = {}
    for transport in ("auto", "shm", "grpc"):
        config = configured("qwen3-0.6b", weights={"transport": transport})
        enough, lacking = (planned(config, H100, shm=size) for size in ("8G", "64M"))
        assert enough.fits
        uses = [use for use in lacking.hosts if use.name == SHM]
        assert [use.fits for use in uses] == ([] if transport == "grpc" else [False])
        assert lacking.fits == (transport != "shm")
        texts[transport] = "\n".join(lines(found(config, H100, shm="64M")))
    assert "does not fit: weights travel over grpc" in texts["auto"]
    assert "DOES NOT FIT as configured:\n  shared memory (/dev/shm)" in texts["shm"]


def test_what_is_assumed_of_a_host_is_said() -> None:
    config = configured("qwen3-0.6b")
    assumed, given = (
        "\n".join(lines(found(config, H100, **host))) for host in ({}, {"host_memory": "2T", "shm": "1T"})
    )
    assert "1600 GiB of host memory and 800 GiB of /dev/shm per node: assumed, the host memory (else --host" in assumed
    assert "2048 GiB of host memory and 1024 GiB of /dev/shm per node: as given" in given
    told = json.loads(json.dumps(to_json(found(config, H100))))
    assert [use["name"] for use in told["hosts"]] == ["host of the learner", SHM]
    assert told["cluster"]["host"]["memory"] == 1600 * GIB


@pytest.mark.parametrize(
    ("shm", "source"), [(None, "this machine's"), ("1G", "this machine's, except the given values")]
)
def test_the_memory_of_this_machine_is_said_to_be_its_own(shm: str | None, source: str) -> None:
    assert parse_devices("1xCPU", shm=shm).host.source == source


def test_processes_on_cpus_of_several_nodes_share_their_nodes() -> None:
    rollout = {"engine": "hf", "replicas": 4, "hf": {"kv_cache_gib": 1.0}}
    learner = {"ranks": 2, "distributed": over(2)}
    plan = planned(configured("qwen3-0.6b", rollout=rollout, learner=learner), "1xCPU-24G", 4)

    node, others = plan.devices
    assert set(node.users) == {"learner, 1 rank(s)", "1 generator(s)", "versions and copies"}
    assert set(others.users) == {"1 generator(s)", "versions"}
    assert plan.host["copy for checkpoints"] == plan.roles[0].resting


def test_the_command_takes_the_sizes_of_hosts_and_ends_with_2_where_they_are_too_small(
    rollmesh: Command, tmp_path: Path
) -> None:
    config = tmp_path / "cfg.yaml"
    config.write_text(yaml.safe_dump(configured("qwen3-0.6b").model_dump(mode="json", exclude_unset=True)))
    small = ("plan", str(config), "--devices", H100, "--host-memory", "8G", "--shm", "1G")
    done = rollmesh(*small)
    assert done.returncode == 2
    assert "8 GiB of host memory and 1 GiB of /dev/shm per node: as given" in done.stdout
    assert "DOES NOT FIT as configured:\n  host of the learner" in done.stdout
    assert rollmesh("plan", str(config), "--devices", H100, "--host-memory", "1T").returncode == 0
    assert "is no size" in rollmesh("plan", str(config), "--devices", H100, "--shm", "64").stderr


def test_where_hosts_are_too_small_the_search_goes_on_with_keys_that_take_less_of_them() -> None:
    config = with_settings(configured("llama-3-70b"), {"model.dtype": "float32"})
    findings = found(config, H100, 8)
    proposal = findings.search.proposal
    assert proposal is not None
    assert proposal.settings["model.dtype"] == "bfloat16"
    assert planned(with_settings(config, proposal.settings), H100, 8).fits


def test_without_a_layout_the_true_obstacle_is_named() -> None:
    small_host = found(configured("llama-3-70b"), H100, 8, host_memory="300G")
    assert small_host.search.proposal is None
    assert small_host.search.obstacles
    assert all("host of the learner: " in obstacle for obstacle in small_host.search.obstacles)
    assert to_json(small_host)["obstacles"] == list(small_host.search.obstacles)
    few = "\n".join(lines(found(configured("llama-3-70b"), H100, 1)))
    assert "  8 rank(s) on 1 node(s): learner: " in few


def test_more_sequence_parallel_ranks_than_devices_are_an_obstacle_with_a_name() -> None:
    config = configured("qwen2.5-7b", learner={"ranks": 2, "parallel": {"sp": 2}})
    search = found(config, "1xH100-80G", 1).search
    assert search.proposal is None
    assert search.obstacles == ("learner.parallel.sp is 2, and there are 1 device(s)",)


def test_named_devices_of_generators_are_those_of_one_node() -> None:
    rollout = {"engine": "vllm", "replicas": 4}
    on = {"devices": {"generators": [[4], [5], [6], [7]]}}
    config = configured("qwen2.5-7b", rollout=rollout, learner={"ranks": 8, "distributed": over(2)}, placement=on)
    assert planned(config, H100, 2).placement.problems == ()


def test_ranks_and_devices_of_an_engine_are_doubled_until_they_fit() -> None:
    rollout = {"engine": "vllm", "replicas": 1, "max_prompt_tokens": 2048, "max_response_tokens": 6144}
    config = with_settings(configured("llama-3-70b", rollout=rollout), {"model.dtype": "float32"})
    *_, together = found(config, H100, 8).savings
    assert together.fits
    assert planned(with_settings(config, together.settings), H100, 8).fits
