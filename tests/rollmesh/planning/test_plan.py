"""Plans of four architectures on 1, 8 and 64 devices, from their configurations alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.planning.architecture import build_on_meta, read_shape
from rollmesh.planning.fsdp_memory import FsdpSetup
from rollmesh.planning.models import RunModels
from rollmesh.planning.plan import micro_batch
from rollmesh.planning.report import lines, to_json
from rollmesh.planning.role_memory import GATHERED, GRADIENTS, LOGITS, OPTIMIZER, PARAMETERS
from rollmesh.planning.settings import with_settings
from rollmesh.planning.shape import ParameterGroup, Rows
from rollmesh.planning.switches import SWITCHES, savings
from tests.config_keys import is_key
from tests.rollmesh.planning.plans import configured, found, over, planned

# Parameters, as the models' pages give them.
SIZES = {"qwen3-0.6b": 0.596e9, "qwen2.5-7b": 7.616e9, "qwen3-30b-a3b": 30.53e9, "llama-3-70b": 70.55e9}


@pytest.mark.parametrize("model", SIZES)
@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (8, 1), (64, 8)])
def test_states_are_divided_over_the_ranks(model: str, ranks: int, nodes: int) -> None:
    plan = planned(configured(model, learner={"ranks": ranks, "distributed": over(nodes)}), "8xH100-80G", nodes)
    (actor,) = plan.roles
    phases = {phase.name: phase.parts for phase in actor.phases}

    assert actor.setup.shape.elements == pytest.approx(SIZES[model], rel=1e-3)
    # Rows that do not divide evenly: the first rank has a little more.
    per_rank = pytest.approx(4 * actor.setup.shape.elements / ranks, rel=2e-3)
    assert phases["optimizer"][PARAMETERS] == per_rank
    assert phases["optimizer"][GRADIENTS] == per_rank
    assert phases["optimizer"][OPTIMIZER] / 2 == per_rank
    assert plan.learner_peak == max(phase.total for phase in actor.phases)


def test_the_first_rank_has_the_most_of_rows_that_do_not_divide_evenly() -> None:
    """As `torch.chunk` divides them: 3, 3, 3 and 1."""
    assert ParameterGroup((Rows(10, 7),)).shard(4) == len(torch.empty(10, 7).chunk(4)[0]) * 7


def test_copies_divide_states_over_their_shards_alone() -> None:
    whole, copies = (
        planned(
            configured("qwen2.5-7b", learner={"ranks": 16, "parallel": parallel, "distributed": over(2)}),
            "8xH100-80G",
            2,
        )
        for parallel in ({}, {"shards": 8})
    )
    for component in (PARAMETERS, OPTIMIZER):
        sizes = [plan.roles[0].phases[-1].parts[component] for plan in (whole, copies)]
        assert sizes[1] == pytest.approx(2 * sizes[0], rel=2e-3)
    config = configured("qwen2.5-7b", learner={"ranks": 16, "parallel": {"shards": 8}, "distributed": over(2)})
    findings = found(config, "8xH100-80G", 2)
    assert "2 copies of 8 shard(s)" in "\n".join(lines(findings))
    assert "16 rank(s), 8 on each of 2 nodes" in "\n".join(lines(findings))
    assert {"learner.parallel.shards": 16} in [saving.settings for saving in findings.savings]
    with pytest.raises(ConfigError, match=r"shards: 8 does not divide the learner's 12 ranks"):
        planned(with_settings(config, {"learner.ranks": 12}), "8xH100-80G", 2)


def test_the_smallest_layout_is_not_held_up_by_the_configured_division() -> None:
    divided = {"ranks": 16, "parallel": {"shards": 8}, "distributed": over(2)}
    on = {"devices": {"learner": list(range(8))}}
    config = configured("qwen3-0.6b", learner=divided, placement=on)

    findings = found(config, "8xH100-80G", 2)

    assert findings.search.proposal is not None
    assert findings.search.proposal.ranks == 1
    assert findings.search.proposal.settings["learner.parallel.shards"] is None
    assert planned(
        with_settings(config, {**findings.search.proposal.settings, "rollout.replicas": 0}), "8xH100-80G", 2
    ).fits
    text = "\n".join(lines(findings))
    assert "smallest layout: --learner.ranks=1 --learner.distributed.nodes=1" in text
    assert "--learner.parallel.shards=null --placement.devices.learner=null" in text

    in_threes = with_settings(config, {"learner.ranks": 12, "learner.parallel.sp": 4, "learner.parallel.shards": None})
    proposal = found(in_threes, "6xH100-80G", 2).search.proposal
    assert proposal is not None
    assert proposal.ranks == 4


def test_what_does_not_fit_is_said_with_the_keys_that_help() -> None:
    config = configured("qwen2.5-7b", learner={"ranks": 1, "activation_checkpointing": False})

    findings = found(config, "8xH100-80G", 1)
    text = "\n".join(lines(findings))

    assert not findings.plan.fits
    assert "DOES NOT FIT" in text
    offered = {key: saving for saving in findings.savings for key in saving.settings if len(saving.settings) == 1}
    assert {"learner.activation_checkpointing", "learner.ranks", "learner.optimizer.state_dtype"} <= offered.keys()
    for key, saving in offered.items():
        changed = planned(with_settings(config, saving.settings), "8xH100-80G")
        fewer = max(a.needed - b.needed for a, b in zip(findings.plan.devices, changed.devices, strict=True))
        assert saving.device_bytes == fewer, key
        assert saving.fits == changed.fits, key
    assert findings.search.proposal is not None
    assert planned(with_settings(config, findings.search.proposal.settings), "8xH100-80G").fits
    assert json.loads(json.dumps(to_json(findings)))["fits"] is False


def test_keys_that_help_together_are_no_more_than_needed() -> None:
    config = configured("qwen2.5-7b")
    findings = found(config, "1xH100-80G")
    *alone, together = findings.savings

    assert not any(saving.fits for saving in alone)
    assert together.fits
    assert len(together.settings) > 1
    for key in together.settings:
        fewer = {other: value for other, value in together.settings.items() if other != key}
        assert not planned(with_settings(config, fewer), "1xH100-80G").fits, key


def test_every_switch_is_a_key_of_the_configuration() -> None:
    assert all(is_key(switch.key) for switch in SWITCHES)
    assert not is_key("learner.batch.no_such_key")


def test_another_engine_is_not_planned_by_the_formulas_of_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"the formulas are those of fsdp2 and megatron, and learner\.engine is mine"):
        found(configured("qwen3-0.6b", learner={"engine": "mine"}), "1xH100-80G")


def test_every_switch_has_a_price() -> None:
    assert all(switch.price for switch in SWITCHES)


def test_a_frozen_role_holds_no_more_than_its_shard_and_can_be_offloaded() -> None:
    config = configured("qwen2.5-7b", algorithm={"name": "grpo", "kl": {"where": "loss"}}, learner={"ranks": 8})
    plan = planned(config, "8xH100-80G")
    _, reference = plan.roles

    assert reference.resting == pytest.approx(2 * SIZES["qwen2.5-7b"] / 8, rel=2e-3)
    offered = list(savings(config, plan, lambda changed: planned(changed, "8xH100-80G")))
    (offload,) = [saving for saving in offered if saving.settings == {"learner.roles.reference.offload": True}]
    assert offload.device_bytes == reference.resting
    assert -offload.host_bytes == 8 * reference.resting


def test_of_an_optimizers_state_on_the_host_two_pieces_are_on_the_device_but_for_checkpoints() -> None:
    """The largest two here are the embedding and the output layer."""
    memory = ({}, {"offload_optimizer": True})
    whole, by_pieces = (
        planned(configured("qwen2.5-7b", learner={"ranks": 8, "memory": keys}), "8xH100-80G").roles[0]
        for keys in memory
    )
    parts = {phase.name: phase.parts for phase in by_pieces.phases}
    assert parts["optimizer"][OPTIMIZER] == 2 * 8 * 152064 * 3584 // 8
    assert parts["checkpoint"] == {PARAMETERS: parts["optimizer"][PARAMETERS], OPTIMIZER: whole.setup.optimizer}
    assert OPTIMIZER not in parts["backward"]
    assert "checkpoint" not in {phase.name for phase in whole.phases}


def test_layers_stay_gathered_for_a_backward_pass_alone() -> None:
    """So those of a frozen role never do."""
    run = {"algorithm": {"name": "grpo", "kl": {"where": "loss"}}}
    plans = [
        planned(
            configured("qwen2.5-7b", learner={"ranks": 8, "memory": {"reshard_after_forward": reshard}}, **run),
            "8xH100-80G",
        )
        for reshard in (True, False)
    ]
    (actor, reference), (kept, other) = ([role.phases[0].parts[GATHERED] for role in plan.roles] for plan in plans)
    assert actor == reference == other
    assert kept == pytest.approx(2 * SIZES["qwen2.5-7b"], rel=1e-3)


def test_gradients_of_later_blocks_are_there_when_a_single_micro_batch_comes_to_an_earlier_one() -> None:
    setup = planned(configured("qwen3-0.6b", learner={"ranks": 2}), "8xH100-80G").roles[0].setup
    assert isinstance(setup, FsdpSetup)
    # With few tokens the second block needs most: the first one is gathered ahead.
    phases = {phase.name: phase.parts for phase in replace(setup, micro_batches=1, tokens=16).phases()}
    assert phases["backward"][GRADIENTS] == 4 * sum(block.trained.shard(2) for block in setup.own.blocks[2:])


def test_tied_and_untied_output_layers_and_large_logits() -> None:
    tied, plain = (RunModels(configured(name)).shape("actor") for name in ("qwen3-0.6b", "qwen2.5-7b"))
    assert tied.tied
    assert not plain.tied
    assert plain.as_value_model().elements == plain.elements - plain.output + plain.hidden + 1

    few = {phase.name: phase.parts for phase in planned(configured("qwen3-0.6b"), "1xH100-80G").roles[0].phases}
    # Tile by tile, far less than 16,384 x 151,936 float32: three of 256 MiB, and sums of gradients.
    assert few["inference"][LOGITS] == 3 << 28
    assert few["output layer"][LOGITS] == (3 << 28) + 4 * tied.hidden * (16384 + 8192)


def test_only_layers_that_attend_have_keys_and_values() -> None:
    kinds = ["mamba", "mlp", "moe", "attention", "mlp"]
    settings = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "n_routed_experts": 4}
    config = AutoConfig.for_model("nemotron_h", hidden_size=256, layers_block_type=kinds, **settings)

    assert read_shape("hybrid", build_on_meta(config)).kv_elements == 2 * 2 * 64


def test_generators_get_what_their_engine_takes() -> None:
    rollout = {"engine": "vllm", "replicas": 2, "vllm": {"tensor_parallel": 2}}
    config = configured("qwen2.5-7b", rollout=rollout, learner={"ranks": 4})
    plan = planned(config, "8xH100-80G")

    assert plan.generator is not None
    assert plan.generator.parts["weights"] == pytest.approx(SIZES["qwen2.5-7b"], rel=1e-3)
    assert plan.generator.total == pytest.approx(0.85 * 81559 * (1 << 20), rel=1e-3)
    assert {use.name for use in plan.devices} == {"learner", "generator"}
    # 28 layers x 2 x 4 heads x 128.
    assert plan.generator.kv_tokens == 2 * plan.generator.parts["KV cache"] // (28672 * 2)

    crowded = planned(with_settings(config, {"rollout.replicas": 4}), "8xH100-80G")
    assert any("only 8 are here" in problem for problem in crowded.problems)


def test_a_cpu_holds_all_processes_and_the_versions_between_them() -> None:
    rollout = {"engine": "hf", "replicas": 1, "hf": {"kv_cache_gib": 1.0}}
    plan = planned(configured("qwen3-0.6b", rollout=rollout, learner={"ranks": 2}), "1xCPU-24G")

    (node,) = plan.devices
    assert set(node.users) == {"learner, 2 rank(s)", "1 generator(s)", "versions and copies"}
    assert node.users["learner, 2 rank(s)"] == 2 * plan.learner_peak
    assert plan.host["copy for checkpoints"] == 2 * plan.roles[0].resting


def test_host_memory_has_the_checkpoints_copy_and_all_that_is_offloaded() -> None:
    learner = {"ranks": 16, "distributed": over(2)}
    critic = {"algorithm": {"name": "ppo"}, "learner": learner}
    plan = planned(configured("qwen2.5-7b", **critic), "8xH100-80G", 2)
    states = sum(role.setup.parameters + role.setup.optimizer for role in plan.roles)
    assert len(plan.roles) == 2
    assert plan.host["copy for checkpoints"] == 8 * states == 8 * sum(role.resting for role in plan.roles)
    assert "offloaded roles" not in plan.host

    for part, share in (("params", 1), ("optimizer", 2), ("gradients", 1)):
        changed = planned(
            configured("qwen2.5-7b", **(critic | {"learner": learner | {"memory": {f"offload_{part}": True}}})),
            "8xH100-80G",
            2,
        )
        assert changed.host["offloaded roles"] == 8 * sum(share * role.setup.parameters for role in changed.roles)
        assert changed.host["copy for checkpoints"] == 8 * states

    memory = {"learner": learner | {"memory": {"offload_activations": True}}}
    waiting = planned(configured("qwen2.5-7b", **(critic | memory)), "8xH100-80G", 2)
    # 28 layers of 3,584 dimensions in bfloat16, on each of the first node's eight ranks.
    assert waiting.host["offloaded activations"] == 8 * 2 * 28 * 3584 * waiting.roles[0].setup.tokens
    assert "offloaded activations" not in plan.host


def test_ranks_that_divide_sequences_have_a_part_of_a_micro_batch_each() -> None:
    config = configured("qwen3-0.6b", learner={"ranks": 8, "batch": {"tokens_per_micro_batch": 32768}})
    divided = with_settings(config, {"learner.parallel.sp": 4})
    before, after = (planned(each, "8xH100-80G").roles[0] for each in (config, divided))

    assert after.setup.tokens == before.setup.tokens / 4 == 8192
    assert after.largest.total < 0.6 * before.largest.total
    assert after.resting == before.resting
    with pytest.raises(ConfigError, match=r"learner\.parallel\.sp: 3 does not divide the 16 attention heads"):
        planned(with_settings(config, {"learner.parallel.sp": 3}), "8xH100-80G")


def test_micro_batches_are_no_larger_than_a_ranks_part_of_a_step() -> None:
    batch = {"groups": 2, "tokens_per_micro_batch": 1 << 20}
    config = configured("qwen3-0.6b", learner={"ranks": 4, "batch": batch})

    # 2 groups of 8 over 4 ranks, 2,048 tokens each.
    assert micro_batch(config) == (4 * 2048, 1)


def test_a_model_without_a_configuration_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing-here"):
        planned(configured(str(tmp_path / "nothing-here")), "8xH100-80G")


def test_a_cache_has_room_for_the_tokens_that_it_takes_memory_for() -> None:
    config = with_settings(configured("qwen3-0.6b"), {"rollout.engine": "hf", "rollout.replicas": 1})
    generator = planned(config, "1xCPU-240G").generator
    assert generator is not None
    assert generator.kv_tokens == generator.wanted_tokens


def test_float32_for_generators_on_gpus_is_told() -> None:
    config = configured("qwen3-0.6b")
    said = "weights travel, and generators compute, in float32"
    assert said not in "\n".join(lines(found(config, "1xH100-80G")))
    single = with_settings(config, {"model.dtype": "float32"})
    assert said in "\n".join(lines(found(single, "1xH100-80G")))
    assert said not in "\n".join(lines(found(single, "1xCPU-240G")))


def test_ranks_with_other_experts_gather_less_and_hold_as_much() -> None:
    """The largest block of Qwen3-30B-A3B is nearly all experts."""
    whole, divided = (
        planned(configured("qwen3-30b-a3b", learner={"ranks": 8, "parallel": {"ep": ep}}), "8xH100-80G").roles[0].setup
        for ep in (1, 8)
    )
    assert divided.division == "FSDP2, full shard, ep 8"
    assert divided.parameters == pytest.approx(whole.parameters, rel=1e-3)
    assert divided.own.largest_block < 0.2 * whole.own.largest_block
    assert divided.shape.elements == whole.shape.elements
    peaks = [max(phase.total for phase in setup.phases()) for setup in (whole, divided)]
    assert peaks[1] < peaks[0]


def test_roles_with_devices_of_their_own_are_left_out_and_named() -> None:
    roles = {"critic": {"at": "own"}}
    sections = {"algorithm": {"name": "ppo"}, "learner": {"roles": roles}}
    plan = planned(configured("qwen2.5-7b", **sections), "8xH100-80G")
    assert [role.setup.name for role in plan.roles] == ["actor"]
    assert any("not in this plan: critic" in notice for notice in plan.notices)
