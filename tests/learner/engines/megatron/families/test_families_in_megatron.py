"""Megatron-Core itself understands the settings of every family, and computes positions and routes as transformers."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from rollmesh.learner.engines.megatron.families.registry import family_of
from tests.learner.engines.megatron.families.test_families import LLAMA3
from tests.learner.engines.megatron.weights.map_cases import KINDS, make_config

pytestmark = pytest.mark.usefixtures("megatron")


@pytest.mark.parametrize("kind", list(KINDS))
def test_its_arguments_have_these_names(kind):
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = make_config(kind)
    settings = family_of(config).settings(config)
    TransformerConfig(**settings.transformer)
    assert settings.model.keys() <= inspect.signature(GPTModel).parameters.keys()


@pytest.mark.parametrize("rope", [{"rope_type": "default", "rope_theta": 1e6}, LLAMA3])
def test_positions_turn_by_the_same_angles(rope):
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    config = make_config("llama", rope_parameters=rope, head_dim=64)
    settings = family_of(config).settings(config).model
    arguments = {name: value for name, value in settings.items() if name.startswith(("rotary_", "rope_"))}
    found = RotaryEmbedding(64, 1.0, **arguments, use_cpu_initialization=True)
    assert torch.allclose(found.inv_freq, LlamaRotaryEmbedding(config).inv_freq, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize(
    ("kind", "changes", "router"),
    [
        ("qwen3_moe", {"norm_topk_prob": True}, Qwen3MoeTopKRouter),
        ("qwen3_moe", {"norm_topk_prob": False}, Qwen3MoeTopKRouter),
        ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 1}, Qwen3MoeTopKRouter),
        ("mixtral", {}, MixtralTopKRouter),
    ],
)
def test_experts_have_the_same_weights(kind, changes, router):
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    config = make_config(kind, **changes)
    settings = family_of(config).settings(config).transformer
    torch.manual_seed(3)
    plain = router(config)
    torch.nn.init.normal_(plain.weight)
    logits, weights, experts = plain(torch.randn(20, config.hidden_size))
    found, chosen = topk_routing_with_score_function(
        logits,
        settings["moe_router_topk"],
        use_pre_softmax=settings["moe_router_pre_softmax"],
        score_function=settings["moe_router_score_function"],
    )
    expected = torch.zeros_like(logits).scatter(1, experts, weights)
    assert torch.equal(chosen, expected > 0)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-7)
