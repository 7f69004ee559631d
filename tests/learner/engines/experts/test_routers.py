"""Routers of experts: losses, loads, biases, and the replay of a generator's choice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from rollmesh.learner.engines.experts.balance import balance_loss, bias_step, load_metrics, loads_of
from rollmesh.learner.engines.experts.layer_router import LayerRouter
from rollmesh.mesh.config.parallel import ParallelSection, RouterSection
from rollmesh.testing.engine_cases import SMALL, assert_same, make_sequences, save_random
from rollmesh.testing.fixtures import GetWorld
from rollmesh.testing.worlds import EngineLayout
from tests.learner.engines.experts import router_cases
from tests.learner.engines.experts.router_cases import CHOSEN, EXPERTS

torch.set_num_threads(1)
ONE = EngineLayout("one_process")
EP = EngineLayout("experts_apart", processes=2, changes={"parallel": ParallelSection(ep=2)})
DIVIDED = EngineLayout("divided_sequences", processes=2, changes={"parallel": ParallelSection(sp=2)})
# The same row has these two.
LAYOUTS = pytest.mark.parametrize(
    "layout",
    [
        pytest.param(layout, id=layout.name, marks=[pytest.mark.exhaustive] * (layout is not ONE))
        for layout in (ONE, EP, DIVIDED)
    ],
)


def test_the_loss_of_balance_is_that_of_transformers_per_chosen_expert() -> None:
    logits = torch.randn(50, EXPERTS, generator=torch.Generator().manual_seed(0))
    expected = load_balancing_loss_func((logits,), EXPERTS, CHOSEN)
    loads = loads_of(logits.topk(CHOSEN).indices, EXPERTS)
    found = balance_loss(logits.softmax(-1).mean(0), loads / loads.sum())
    assert float(found) == pytest.approx(float(expected) / CHOSEN, rel=1e-6)


def test_experts_that_are_used_alike_have_a_loss_of_one() -> None:
    equal = torch.full((EXPERTS,), 1.0 / EXPERTS)
    assert float(balance_loss(equal, equal)) == pytest.approx(1.0)
    even = load_metrics(torch.full((2, EXPERTS), 3.0))
    assert even == {"expert_load_max": pytest.approx(1.0), "expert_load_entropy": pytest.approx(1.0)}
    one = load_metrics(torch.tensor([[8.0, 0, 0, 0], [2, 2, 2, 2]]))
    assert one == {"expert_load_max": pytest.approx(4.0), "expert_load_entropy": pytest.approx(0.5)}


def test_a_router_is_trained_to_balance_by_the_loads_of_the_last_step() -> None:
    router = LayerRouter(EXPERTS, RouterSection(load_balance_coeff=0.5))
    router.responses, router.weight = torch.tensor([1.0, 2.0, 0.0]), 3.0
    router.shares = torch.arange(EXPERTS) / 6
    logits = torch.randn(3, EXPERTS, generator=torch.Generator().manual_seed(0)).requires_grad_()
    watched = router.watch(logits, logits * 1.0, lambda counts: counts, None)
    (found,) = torch.autograd.grad(watched.sum(), logits)
    loss = 3.0 * 0.5 * balance_loss(router.responses @ logits.softmax(-1), router.shares)
    (expected,) = torch.autograd.grad(logits.sum() + loss, logits)
    torch.testing.assert_close(found, expected)


def test_the_bias_of_experts_with_less_than_the_mean_load_rises() -> None:
    assert bias_step(torch.tensor([6.0, 0.0, 3.0, 3.0]), 0.1).tolist() == pytest.approx([-0.1, 0.1, 0.0, 0.0])


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, marks=pytest.mark.exhaustive), {"activation_checkpointing": True}],
    ids=["kept", "computed again"],
)
def test_losses_of_routers_are_those_of_plain_torch(
    engine_worlds: GetWorld, engine_models: Mapping[str, Path], changes: dict[str, Any]
) -> None:
    router = {"load_balance_coeff": 0.5, "z_loss_coeff": 0.1}
    model, sequences = engine_models["experts"], make_sequences(1)
    balance, z, gradient = router_cases.losses(model, sequences, 0.1)
    ((result, found),) = engine_worlds(ONE).run(router_cases.step, model, router, sequences, 24, changes)
    assert result.metrics["load_balance_loss"] == pytest.approx(balance, rel=1e-5)
    assert result.metrics["router_z_loss"] == pytest.approx(z, rel=1e-5)
    assert_same(found, gradient)


# That of one process is above. In `make test` a row of `test_equivalence` has both divisions at once.
@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", [EP, DIVIDED], ids=lambda layout: layout.name)
def test_a_loss_over_tokens_is_the_same_however_they_are_divided(
    engine_worlds: GetWorld, engine_models: Mapping[str, Path], layout: EngineLayout
) -> None:
    model, sequences = engine_models["experts"], make_sequences(1)
    balance, z, gradient = router_cases.losses(model, sequences, 0.1)
    router = {"load_balance_coeff": 0.5, "z_loss_coeff": 0.1}
    results = engine_worlds(layout).run(router_cases.step, model, router, sequences, 24, {})
    assert_same(results[0][1], gradient)
    for result, _ in results:
        assert result.metrics["load_balance_loss"] == pytest.approx(balance, rel=1e-5)
        assert result.metrics["router_z_loss"] == pytest.approx(z, rel=1e-5)


def test_a_step_in_parts_has_the_same_weight_of_these_losses(
    engine_worlds: GetWorld, engine_models: Mapping[str, Path]
) -> None:
    ((whole, parts),) = engine_worlds(ONE).run(router_cases.in_parts, engine_models["experts"])
    # Parts are weighted by their trained tokens, and computed ones are not quite in proportion.
    assert parts == pytest.approx(whole, rel=0.1)


def test_a_continued_run_balances_by_the_loads_of_its_last_step(
    engine_worlds: GetWorld, engine_models: Mapping[str, Path], tmp_path: Path
) -> None:
    ((whole, continued),) = engine_worlds(ONE).run(router_cases.continued, engine_models["experts"], tmp_path)
    assert_same(continued, whole)


@pytest.mark.parametrize("rows", [False, True], ids=["packed", "rows"])
@LAYOUTS
def test_log_probs_are_those_of_the_given_experts(
    engine_worlds: GetWorld, engine_models: Mapping[str, Path], layout: EngineLayout, rows: bool
) -> None:
    if rows and layout is DIVIDED:
        pytest.skip("rows are not divided")
    model, sequences = engine_models["experts"], router_cases.routed(make_sequences(1), 0)
    expected = router_cases.forced_log_probs(model, sequences)
    for found in engine_worlds(layout).run(router_cases.infer, model, {"replay": True}, sequences, rows):
        if found is not None:
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    (own,) = engine_worlds(ONE).run(router_cases.infer, model, {}, sequences, rows)
    assert float((own - expected).abs().max()) > 1e-2


@pytest.mark.parametrize(
    "changes",
    [pytest.param({}, marks=pytest.mark.exhaustive), {"activation_checkpointing": True}],
    ids=["kept", "computed again"],
)
def test_experts_that_the_router_would_not_have_chosen_are_counted(
    engine_worlds: GetWorld, engine_models: Mapping[str, Path], changes: dict[str, Any]
) -> None:
    model, sequences = engine_models["experts"], router_cases.routed(make_sequences(1), 0)
    ((result, gradient),) = engine_worlds(ONE).run(router_cases.step, model, {"replay": True}, sequences, 24, changes)
    # Two of four experts by chance: one in six are those of the router.
    assert 0.7 < result.metrics["router_drift"] < 0.95
    assert 0.8 < result.metrics["router_replayed"] < 1.0
    ((_, other),) = engine_worlds(EP).run(router_cases.step, model, {"replay": True}, sequences, 24, changes)[:1]
    assert_same(gradient, other)


@pytest.mark.parametrize("layout", [ONE, EP], ids=lambda layout: layout.name)
def test_biases_move_against_the_load_and_leave_with_the_weights(
    engine_worlds: GetWorld, tmp_path: Path, layout: EngineLayout
) -> None:
    latent = {"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    experts = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
    }
    config = AutoConfig.for_model(
        "deepseek_v3",
        **SMALL
        | {"num_key_value_heads": 4}
        | latent
        | experts
        | {"first_k_dense_replace": 1, "tie_word_embeddings": False},
    )
    save_random(config, tmp_path)
    for biases, metrics in engine_worlds(layout).run(router_cases.bias_after, tmp_path, 0.25):
        assert metrics["expert_load_max"] >= 1.0
        if biases:
            (bias,) = biases.values()
            assert set(bias.tolist()) <= {-0.25, 0.0, 0.25}
            assert bias.abs().max() == 0.25
