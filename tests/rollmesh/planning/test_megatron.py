"""Plans of models that Megatron's engine divides: numbers by hand, and what holds for every division."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rollmesh.learner.engines.megatron.families.registry import family_of
from rollmesh.learner.engines.megatron.parallel import ParallelPlace, ParallelSizes
from rollmesh.learner.engines.megatron.requirements import resolve_sizes
from rollmesh.learner.engines.megatron.weights.weight_map import WeightMap
from rollmesh.mesh.config.parallel import ParallelSection
from rollmesh.mesh.errors import ConfigError
from rollmesh.planning.architecture import build_on_meta
from rollmesh.planning.megatron.activations import Share, kept
from rollmesh.planning.megatron.layouts import copy_size, divisions
from rollmesh.planning.megatron.memory import MegatronSetup, owned
from rollmesh.planning.megatron.model_sizes import ModelSizes, read_sizes
from rollmesh.planning.megatron.schedule import most_in_flight, waiting
from rollmesh.planning.models import RunModels
from rollmesh.planning.report import lines, to_json
from rollmesh.planning.role_memory import ACTIVATIONS, GRADIENTS, LOGITS, OPTIMIZER, PARAMETERS, LogitRoom
from rollmesh.planning.settings import with_settings
from rollmesh.planning.shape import ModelShape
from tests.rollmesh.planning.plans import configured, found, over, planned

H100 = "8xH100-80G"
MIB = 1 << 20
MODELS = ("llama-3.1-8b", "qwen3-0.6b", "qwen3-30b-a3b", "mixtral-8x7b")
ROOM = LogitRoom(kept=1 << 30, tile=1 << 26, rows=8192)


@cache
def model(name: str) -> tuple[ModelShape, ModelSizes]:
    models = RunModels(configured(name))
    return models.shape("actor"), models.sizes("actor")


def sizes_of(name: str, ranks: int, **keys: Any) -> ParallelSizes:
    return resolve_sizes(ParallelSection(**keys), ranks, model(name)[1].facts)


def setup(name: str, sizes: ParallelSizes, **how: Any) -> MegatronSetup:
    shape, whole = model(name)
    values = {
        "trained": True,
        "compute_bytes": 2,
        "recompute": True,
        "offload": False,
        "tokens": 16384,
        "micro_batches": 8,
        "logits": ROOM,
    }
    return MegatronSetup(name="actor", shape=shape, model=whole, sizes=sizes, **(values | how))


def divided(name: str, ranks: int, parallel: dict[str, int], **learner: Any) -> Any:
    return configured(name, learner={"engine": "megatron", "ranks": ranks, "parallel": parallel, **learner})


@st.composite
def layouts(draw: st.DrawFn) -> tuple[str, ParallelSizes]:
    name = draw(st.sampled_from(MODELS))
    powers = st.sampled_from([1, 2, 4])
    keys = {key: draw(powers) for key in ("tp", "pp", "vpp", "cp")}
    keys |= {key: draw(powers) for key in ("ep", "etp")} if model(name)[1].facts.experts else {}
    ranks = keys["tp"] * keys["pp"] * keys["cp"] * draw(powers)
    try:
        return name, sizes_of(name, ranks, **keys)
    except ConfigError:
        assume(False)
        raise


def test_an_8b_model_of_two_stages_by_hand() -> None:
    # 4,096 x (4,096 + 2 x 1,024 + 4,096) for attention and 3 x 4,096 x 14,336 for the MLP; two norms.
    layer = 218_103_808 // 2 + 2 * 4096
    embedding = 128_256 * 4096 // 2
    first, last = setup("llama-3.1-8b", sizes_of("llama-3.1-8b", 8, tp=2, pp=2)).stages

    assert first.parameters == 16 * layer + embedding == 2_007_629_824
    assert last.parameters == 16 * layer + embedding + 4096 == 2_007_633_920
    assert (first.in_flight, last.in_flight) == (2, 1)
    phases = {phase.name: phase.parts for phase in first.phases}
    # Masters and two moments, of two data-parallel ranks.
    states = {PARAMETERS: 4_015_259_648, GRADIENTS: 8_030_519_296, OPTIMIZER: 12_045_778_944}
    assert phases["optimizer"] == states
    # Two micro-batches: the inputs of 16 layers, and what leaves the stage; half of 16,384 tokens each.
    each = 16384 // 2 * 4096 * 2
    assert phases["last gradients"][ACTIVATIONS] == 2 * 17 * each + each == 35 * 64 * MIB
    outputs = {phase.name: phase.parts for phase in last.phases}
    # One; the last norm's two tensors of half of the tokens, and two of all.
    assert outputs["output layer"][ACTIVATIONS] == 16 * each + 2 * each + 2 * 2 * each
    # Two tiles and the largest rounded product, sums for states and for a tile's weights.
    tiles = 2 * (1 << 28) + max(2 * (1 << 26) + 4 * 4096 * 8192, 1 << 28)
    assert outputs["output layer"][LOGITS] == tiles + 4 * 4096 * (16384 + 8192)
    assert "output layer" not in phases
    assert "last gradients" not in outputs


def test_the_activations_of_a_layer_by_hand() -> None:
    """8,192 of 16,384 tokens outside of matrices; widths 4,096, 1,024 and 14,336, half of them inside."""
    _, whole = model("llama-3.1-8b")
    (layer,) = whole.kinds
    share = Share(16384, sizes_of("llama-3.1-8b", 2, tp=2), 2)
    attention = (3 * 4096 + 3 * 1024) * 16384 + 4 * 16384 * 16

    assert kept(share, layer.widths, False) == 4 * 4096 * 16384 + attention + 3 * 14336 * 16384 == 1_225_785_344
    assert kept(share, layer.widths, "selective") == 3 * 4096 * 16384 + attention
    assert kept(share, layer.widths, True) == 4096 * 16384
    undivided = Share(16384, sizes_of("llama-3.1-8b", 2, tp=2, sp=1), 2)
    assert kept(undivided, layer.widths, True) == 2 * 4096 * 16384


def test_the_activations_of_experts_by_hand() -> None:
    _, whole = model("qwen3-30b-a3b")
    (layer,) = whole.kinds
    # Its heads are normalized.
    per_token = 2 * (4 * 2048 + 4 * 4096 + 4 * 512) + 4 * 32
    rows = 2 * 8 * (2048 + 3 * 768)
    router = 128 * 9 + 8 * 8
    for ep in (1, 8):
        share = Share(1000, sizes_of("qwen3-30b-a3b", 8, ep=ep), 2)
        assert kept(share, layer.widths, False) == 1000 * (per_token + rows + router)
        assert kept(share, layer.widths, "selective") == 1000 * (per_token + rows - 2 * 8 * 768 + router)


@given(layouts())
def test_the_parameters_of_stages_are_the_models(layout: tuple[str, ParallelSizes]) -> None:
    name, sizes = layout
    shape, whole = model(name)
    again = whole.embedding.total if whole.tied and sizes.pp > 1 else 0

    stages = setup(name, sizes).stages

    assert sum(stage.elements.total for stage in stages) == whole.elements + again
    assert whole.elements == shape.elements
    assert sum(len(part) for stage in stages for part in stage.layers) == len(whole.layers)


@given(layouts(), st.sampled_from([2, 4]))
def test_data_parallel_ranks_divide_the_optimizer_alone(layout: tuple[str, ParallelSizes], times: int) -> None:
    name, sizes = layout
    one, more = setup(name, sizes), setup(name, replace(sizes, processes=times * sizes.processes))

    assert more.parameters == one.parameters
    assert more.gradients == one.gradients
    assert more.optimizer == pytest.approx(one.optimizer / times, rel=1e-6)
    for few, many in zip(one.stages, more.stages, strict=True):
        assert owned(many.elements, more.sizes) <= owned(few.elements, one.sizes)
        assert many.largest.total <= few.largest.total


@given(
    layouts(),
    st.sampled_from([True, False, "selective"]),
    st.sampled_from([256, 1000, 16384]),
    st.sampled_from([2, 4]),
)
def test_more_tensor_parallelism_never_needs_more(
    layout: tuple[str, ParallelSizes], recompute: Any, tokens: int, micro_batches: int
) -> None:
    """As many data-parallel ranks, and twice the others."""
    name, sizes = layout
    facts = model(name)[1].facts
    assume(facts.kv_heads % (2 * sizes.tp) == 0)
    wider = replace(sizes, processes=2 * sizes.processes, tp=2 * sizes.tp, sequence_parallel=True)
    how = {"recompute": recompute, "tokens": tokens, "micro_batches": micro_batches}

    before, after = setup(name, sizes, **how), setup(name, wider, **how)

    for few, many in zip(before.stages, after.stages, strict=True):
        for phase, fewer in zip(few.phases, many.phases, strict=True):
            # A token more where tokens do not divide.
            slack = 64 * len(few.layers[0]) * few.in_flight * 1024 if tokens % wider.tp else 0
            assert fewer.total <= phase.total + slack, phase.name


@given(layouts(), st.integers(1, 20))
def test_a_role_that_is_not_trained_has_parameters_alone(layout: tuple[str, ParallelSizes], micro_batches: int) -> None:
    frozen = setup(layout[0], layout[1], trained=False, recompute=False, micro_batches=micro_batches)

    assert {phase.name for phase in frozen.phases()} == {"inference"}
    assert frozen.resting() == {PARAMETERS: frozen.parameters}
    assert frozen.staged == 0


def test_interleaved_stages_keep_what_the_papers_say() -> None:
    sizes = ParallelSizes(4, pp=4, vpp=2)
    # 1 + (p - 1) / (p v) of all layers, on the first stage: 1 + 3 / 8 of 80.
    assert most_in_flight(sizes, 0, 64, [10, 10]) == 110
    assert [most_in_flight(ParallelSizes(4, pp=4), stage, 64, [20]) for stage in range(4)] == [80, 60, 40, 20]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("keys", [{"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2}, {"tp": 4, "pp": 4, "cp": 2}])
def test_parameters_are_those_of_the_engines_own_map(name: str, keys: dict[str, int]) -> None:
    config = RunModels(configured(name)).config("actor")
    config = type(config).from_dict(config.to_dict() | {"num_hidden_layers": 4, "vocab_size": 1024})
    whole = build_on_meta(config)
    shapes = {parameter: tuple(value.shape) for parameter, value in whole.named_parameters()}
    keys |= {"ep": 2, "etp": 2} if "mixtral" in name else {}
    read = read_sizes(name, config, shapes)
    sizes = resolve_sizes(ParallelSection(**keys), 32, read.facts)
    described = dict(whole.named_parameters())
    engine = WeightMap(family_of(config), config, sizes, described, 1024)

    for stage in replace(setup(name, sizes), model=read).stages:
        place = ParallelPlace(pp=stage.number)
        boxes = [box for parameter in shapes for box in engine.boxes(parameter, place)]
        assert stage.parameters == sum(_volume(box) for box in boxes), (
            "the first tensor-parallel process contributes all that it has"
        )


def _volume(box: tuple[slice, ...]) -> int:
    count = 1
    for part in box:
        count *= part.stop - part.start
    return count


def test_float32_parameters_are_their_own_masters() -> None:
    sizes = sizes_of("llama-3.1-8b", 4, tp=4)
    half, single = (setup("llama-3.1-8b", sizes, compute_bytes=nbytes) for nbytes in (2, 4))

    assert single.parameters == 2 * half.parameters == single.gradients
    assert half.optimizer == 12 * half.worst.parameters
    assert single.optimizer == 8 * single.worst.parameters
    assert half.staged == single.staged == 12 * half.worst.parameters


def test_a_value_model_has_a_scalar_head_on_the_last_stage() -> None:
    _, whole = model("qwen3-0.6b")
    critic = whole.as_value_model()
    assert critic.elements == whole.elements + 1024 + 1
    sizes = sizes_of("qwen3-0.6b", 2, pp=2)
    first, last = replace(setup("qwen3-0.6b", sizes), model=critic).stages
    tied_first, tied_last = setup("qwen3-0.6b", sizes).stages
    assert first.parameters == tied_first.parameters
    assert last.parameters == tied_last.parameters - 151936 * 1024 + 1024 + 1
    assert last.largest.total < tied_last.largest.total


def test_the_report_has_a_line_for_each_stage_and_names_the_worst() -> None:
    findings = found(divided("llama-3.1-8b", 8, {"tp": 2, "pp": 2}), H100)
    text = "\n".join(lines(findings))

    assert "8 rank(s), Megatron: tp 2, pp 2, dp 2, compute dtype of 2 bytes" in text
    assert "GiB per rank of stage 0, which needs most" in text
    assert "  stage 0: 16 layers, 2.008 billion parameters per rank, 2 micro-batch(es) in flight: " in text
    assert "  stage 1: 16 layers, 2.008 billion parameters per rank, 1 micro-batch(es) in flight: " in text
    (actor,) = to_json(findings)["roles"]
    assert actor["division"]["parallel"] | {"tp": 2, "pp": 2, "dp": 2} == actor["division"]["parallel"]
    assert [stage["layers"] for stage in actor["division"]["stages"]] == [16, 16]
    peak = max(stage["peak_bytes"] for stage in actor["division"]["stages"])
    assert peak == findings.plan.learner_peak
    undivided = "\n".join(lines(found(divided("qwen3-0.6b", 1, {}), H100)))
    assert "stage 0" not in undivided
    assert "Megatron: not divided" in undivided


def test_what_does_not_fit_undivided_is_divided_by_what_is_proposed() -> None:
    config = divided("qwen2.5-32b", 8, {})
    findings = found(config, H100)

    assert not findings.plan.fits
    (saving,) = [each for each in findings.savings if "learner.parallel.tp" in each.settings]
    assert saving.fits
    assert saving.settings == {"learner.parallel.tp": 8}
    assert planned(with_settings(config, saving.settings), H100).fits
    proposal = findings.search.proposal
    assert proposal is not None
    assert planned(with_settings(config, proposal.settings), H100).fits
    (shown,) = [line for line in lines(findings) if line.startswith("smallest layout: ")]
    assert all(f"--learner.parallel.{key}={value}" in shown for key, value in proposal.parallel.items())


@pytest.mark.parametrize("shared", [False, True])
def test_switches_of_the_learner_are_told_where_generators_do_not_fit_either(shared: bool) -> None:
    """Eight ranks on all devices, and a generator that is too large for one."""
    devices = list(range(8)) if shared else None
    learner, rollout = {"engine": "megatron", "ranks": 8}, {"engine": "hf", "replicas": 1}
    named = {"devices": {"learner": devices, "generators": devices and [devices[:1]]}}
    config = configured("qwen3-30b-a3b", rollout=rollout, learner=learner, placement=named)
    findings = found(config, H100)
    text = "\n".join(lines(findings))

    assert findings.plan.placement.shared is shared
    assert not any(saving.fits for saving in findings.savings)
    (saving,) = [saving for saving in findings.savings if saving.learner_fits]
    assert saving.settings == {"learner.parallel.tp": 2, "learner.parallel.ep": 8}
    assert planned(with_settings(config, {**saving.settings, "rollout.replicas": 0}), H100).fits
    shown = text.partition("no switch that saves memory makes it fit\n")[2].splitlines()
    assert shown[0] == "for the learner alone, GiB on a device (on the host):"
    assert shown[1].startswith("  --learner.parallel.tp=2 --learner.parallel.ep=8: ")
    assert "then the learner fits its devices" in shown[1]
    assert not shown[2].startswith("  ")


def test_a_learner_that_fits_alone_needs_no_switch() -> None:
    rollout = {"engine": "hf", "replicas": 1}
    learner = {"engine": "megatron", "ranks": 8, "parallel": {"tp": 2, "ep": 8}}
    findings = found(configured("qwen3-30b-a3b", rollout=rollout, learner=learner), H100)
    assert not findings.plan.fits
    assert not any(saving.learner_fits for saving in findings.savings)
    assert "for the learner alone" not in "\n".join(lines(findings))


def test_what_the_learner_needs_together_is_told_without_a_generators_part() -> None:
    """One switch is not enough, and the generator fits with none."""
    config = configured("qwen2.5-7b", rollout={"engine": "hf", "replicas": 8}, learner={"ranks": 1})
    (together,) = [saving for saving in found(config, "1xH100-80G").savings if saving.learner_fits]
    assert len(together.settings) > 1
    for key in together.settings:
        fewer = {other: value for other, value in together.settings.items() if other != key}
        alone = with_settings(config, {**fewer, "rollout.replicas": 0})
        assert not planned(alone, "1xH100-80G").fits, key


def test_stages_wait_by_the_papers_formula() -> None:
    """(p - 1) / (m v) of the time that they compute, arXiv:2104.04473, sec. 2.2."""
    assert waiting(ParallelSizes(4), 4) == 0
    assert waiting(ParallelSizes(4, pp=4), 8) == 3 / 8
    assert waiting(ParallelSizes(4, pp=4, vpp=2), 8) == 3 / 16
    # Interleaved stages fill up to 8.
    assert waiting(ParallelSizes(4, pp=4, vpp=2), 5) == 3 / 16
    findings = found(divided("llama-3.1-8b", 8, {"tp": 2, "pp": 2}), H100)
    text = "\n".join(lines(findings))
    assert "  stages wait for 6.2% of the time that they compute" in text
    (actor,) = to_json(findings)["roles"]
    assert actor["division"]["waiting"] == 1 / actor["micro_batches"] == 1 / 16
    assert "stages wait" not in "\n".join(lines(found(divided("llama-3.1-8b", 8, {}), H100))).partition("fits")[0]


@pytest.mark.parametrize(("ranks", "replicas"), [(8, 0), (8, 1), (1, 1)])
def test_divisions_that_fit_are_told_with_what_one_chooses_by(ranks: int, replicas: int) -> None:
    """With one rank no division fits; then those of the smallest layout are told."""
    config = configured(
        "qwen3-30b-a3b",
        rollout={"engine": "hf", "replicas": replicas},
        learner={"engine": "megatron", "ranks": ranks},
    )
    findings = found(config, H100)
    text = "\n".join(lines(findings))

    assert 1 < len(findings.choices) <= 5
    settings = findings.search.proposal.settings if ranks == 1 and findings.search.proposal else {}
    for choice in findings.choices:
        tried = with_settings(config, settings | {"rollout.replicas": 0} | {"learner.parallel": choice.parallel})
        plan = planned(tried, H100)
        actor = plan.roles[0].setup
        assert isinstance(actor, MegatronSetup)
        assert plan.fits
        assert plan.learner_peak == choice.rank_bytes
        assert actor.sizes.dp == choice.dp
        assert actor.micro_batches == choice.micro_batches
        assert waiting(actor.sizes, actor.micro_batches) == choice.waiting
    assert "divisions of 8 rank(s) that fit their devices, the least first, without generators:" in text
    assert "  learner.parallel: {tp: 2, ep: 8}: dp 4, 70.62 GiB per rank, up to " in text
    assert "ep divides the same ranks as dp" in text
    assert to_json(findings)["divisions"][0]["parallel"] == {"tp": 2, "ep": 8}


def test_the_layout_of_devices_is_told_where_hosts_are_too_small() -> None:
    """A large model's versions on a host of the assumed size."""
    config = divided("qwen3-235b-a22b", 64, {}, distributed=over(8))
    findings = found(config, H100, 8)
    assert not any(saving.fits for saving in findings.savings)
    (saving,) = [saving for saving in findings.savings if saving.learner_fits]
    first = findings.choices[0]
    assert {f"learner.parallel.{key}": value for key, value in first.parallel.items()} == saving.settings
    plan = planned(with_settings(config, saving.settings), H100, 8)
    assert plan.on_devices
    assert not plan.fits


def test_dense_models_have_no_word_about_experts() -> None:
    text = "\n".join(lines(found(divided("llama-3.1-8b", 8, {"tp": 2, "pp": 2}), H100)))
    assert "ep divides" not in text
    assert "divisions of 8 rank(s) that fit" in text
    assert "divisions of" not in "\n".join(lines(found(configured("qwen3-0.6b"), H100)))


def test_the_proposal_takes_the_fewest_ranks_and_the_least_division() -> None:
    config = divided("qwen3-30b-a3b", 16, {"tp": 4, "pp": 4}, distributed=over(2))
    proposal = found(config, H100, 2).search.proposal
    assert proposal is not None
    assert (proposal.ranks, proposal.nodes) == (8, 1)
    for keys in divisions(ParallelSection(), 8, 8, model("qwen3-30b-a3b")[1].facts):
        least = {"tp": 1, "pp": 1, "ep": 1} | keys
        fits = planned(divided("qwen3-30b-a3b", 8, keys, batch={"tokens_per_micro_batch": 2048}), H100).fits
        if fits:
            break
    chosen = {key: value for key, value in proposal.parallel.items() if key != "etp"}
    assert chosen == {key: value for key, value in least.items() if value > 1}


def test_without_a_division_that_fits_the_nearest_is_named() -> None:
    search = found(divided("qwen2.5-72b", 8, {}), H100).search
    assert search.proposal is None
    assert search.obstacles[0].startswith("8 rank(s) on 1 node(s), Megatron: tp 8: learner: ")


@given(st.sampled_from(MODELS), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2]))
def test_divisions_are_allowed_and_begin_with_the_least(name: str, per_node: int, nodes: int) -> None:
    facts, ranks = model(name)[1].facts, per_node * nodes
    ranks_of_a_copy = []
    for keys in divisions(ParallelSection(), ranks, per_node, facts):
        sizes = resolve_sizes(ParallelSection(**keys), ranks, facts)
        assert max(sizes.tp, sizes.ep) <= per_node
        ranks_of_a_copy.append(copy_size(sizes))
    assert ranks_of_a_copy[0] == 1
    assert ranks_of_a_copy == sorted(ranks_of_a_copy)
    assert max(ranks_of_a_copy) <= ranks


def test_experts_are_divided_before_layers_and_matrices() -> None:
    facts = model("mixtral-8x7b")[1].facts
    first, second, third, *_ = divisions(ParallelSection(), 2, 2, facts)
    assert (first, second, third) == ({}, {"ep": 2}, {"tp": 2, "ep": 2})


def test_settings_of_the_other_engine_are_refused_and_not_offered() -> None:
    config = divided("qwen3-0.6b", 2, {"tp": 2}, memory={"offload_activations": True})
    with pytest.raises(ConfigError, match=r"learner\.memory\.offload_activations"):
        planned(config, H100)
    offered = {key for saving in found(divided("qwen2.5-32b", 4, {"tp": 4}), H100).savings for key in saving.settings}
    assert "learner.memory.offload_activations" not in offered
    assert "learner.optimizer.state_dtype" not in offered
    assert "learner.parallel.pp" in offered or "learner.ranks" in offered


def test_switches_divide_tokens_further() -> None:
    config = divided("llama-3.1-8b", 8, {"tp": 2, "sp": 1}, batch={"tokens_per_micro_batch": 65536})
    offered = {key: saving for saving in found(config, H100).savings for key in saving.settings}
    assert offered["learner.parallel.sp"].settings["learner.parallel.sp"] == 2
    assert offered["learner.parallel.cp"].device_bytes > 0


def test_roles_have_engines_of_their_own() -> None:
    run = {"algorithm": {"name": "grpo", "kl": {"where": "loss"}}}
    learner = {"engine": "megatron", "ranks": 8, "parallel": {"tp": 2}, "roles": {"reference": {"engine": "fsdp2"}}}
    plan = planned(configured("qwen3-0.6b", learner=learner, **run), H100)
    actor, reference = (role.setup for role in plan.roles)

    assert actor.division == "Megatron: tp 2, dp 4"
    assert reference.division == "FSDP2, full shard"
    assert plan.learner_peak == max(
        actor_peak + reference_rest
        for actor_peak, reference_rest in [
            (plan.roles[0].largest.total, plan.roles[1].resting),
            (plan.roles[0].resting, plan.roles[1].largest.total),
        ]
    )


def test_micro_batches_are_those_of_a_data_parallel_rank() -> None:
    wide, narrow = (
        planned(divided("llama-3.1-8b", 8, keys), H100).roles[0].setup for keys in ({}, {"tp": 2, "pp": 2, "cp": 2})
    )
    assert narrow.micro_batches == 8 * wide.micro_batches
    assert narrow.tokens == wide.tokens / 2


def test_offloaded_parts_are_on_the_device_only_while_they_are_used() -> None:
    memory = {"offload_optimizer": True, "offload_gradients": True}
    here, away = (planned(divided("llama-3.1-8b", 4, {"tp": 4}, memory=keys), H100) for keys in ({}, memory))
    phases = {phase.name: phase.parts for phase in away.roles[0].phases}
    setup_of = away.roles[0].setup
    assert OPTIMIZER not in phases["backward"]
    assert phases["optimizer"][OPTIMIZER] == setup_of.optimizer
    assert away.host["offloaded roles"] == 4 * (setup_of.optimizer + setup_of.gradients)
    assert "offloaded roles" not in here.host
