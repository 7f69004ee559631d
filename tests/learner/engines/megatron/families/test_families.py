"""A configuration means the same to Megatron as to transformers, or it is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn import functional
from transformers import AutoConfig

from rollmesh.learner.engines.megatron.families.registry import FAMILIES, family_of
from rollmesh.mesh.errors import ConfigError
from tests.learner.engines.megatron.weights.map_cases import KINDS, make_config

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def translate(kind: str, **changes: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of a tiny model: of its layers, and of the model."""
    config = make_config(kind, **changes)
    found = family_of(config).settings(config)
    return found.transformer, found.model


def test_every_family_has_a_tiny_model():
    assert set(FAMILIES) == set(KINDS)


def test_sizes_are_those_of_the_configuration():
    layers, model = translate("qwen3", rms_norm_eps=1e-7, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert layers == {
        "num_layers": 5,
        "hidden_size": 16,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "kv_channels": 6,
        "ffn_hidden_size": 24,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-7,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    assert model == {
        "max_sequence_length": 64,
        "share_embeddings_and_output_weights": False,
        "position_embedding_type": "rope",
        "rotary_base": 1e6,
    }


@pytest.mark.parametrize("kind", list(KINDS))
def test_families_differ_where_their_layers_do(kind):
    layers, _ = translate(kind)
    assert layers["add_qkv_bias"] == (kind == "qwen2")
    assert layers["qk_layernorm"] == kind.startswith("qwen3")
    assert ("num_moe_experts" in layers) == (kind in ("qwen3_moe", "mixtral"))


def test_a_head_without_a_width_has_its_share_of_the_hidden_size():
    assert translate("mixtral", head_dim=None)[0]["kv_channels"] == 2


def test_a_critic_is_not_tied():
    config = make_config("qwen3", tied=True)
    family = family_of(config)
    assert family.settings(config).tied
    assert not family.settings(config, value_model=True).tied


def test_llama3s_positions_have_their_factor():
    model = translate("llama", rope_parameters=LLAMA3)[1]
    assert (model["rotary_base"], model["rope_scaling"], model["rope_scaling_factor"]) == (500000.0, True, 32.0)


def test_experts_are_in_their_layers():
    layers, _ = translate("qwen3_moe", mlp_only_layers=[1], decoder_sparse_step=2)
    assert layers["moe_layer_freq"] == [0, 0, 0, 1, 0]
    assert (layers["num_moe_experts"], layers["moe_router_topk"], layers["moe_ffn_hidden_size"]) == (8, 2, 8)
    assert "num_moe_experts" not in translate("qwen3_moe", mlp_only_layers=list(range(5)))[0]
    mixtral, _ = translate("mixtral")
    assert (mixtral["moe_layer_freq"], mixtral["moe_ffn_hidden_size"]) == ([1] * 5, 24)


@pytest.mark.parametrize("normalized", [True, False])
def test_weights_of_experts_are_normalized_or_not(normalized):
    assert translate("qwen3_moe", norm_topk_prob=normalized)[0]["moe_router_pre_softmax"] == (not normalized)
    assert translate("mixtral")[0]["moe_router_pre_softmax"] is False


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("llama", {"attention_bias": True}, "attention_bias: True"),
        ("llama", {"mlp_bias": True}, "mlp_bias: True"),
        ("qwen3", {"attention_bias": True}, "attention_bias: True"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias: True"),
        ("qwen2", {"hidden_act": "gelu"}, "hidden_act: gelu"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}, "sliding_attention"),
        ("qwen3_moe", {"use_sliding_window": True}, "sliding_attention"),
        ("mixtral", {"sliding_window": 8}, "sliding_attention"),
        ("mixtral", {"num_experts_per_tok": 1}, "one expert per token"),
        ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "one expert per token"),
        ("llama", {"rope_parameters": LLAMA3 | {"high_freq_factor": 8.0}}, "high_freq_factor: 8.0"),
        ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 4096}}, "embeddings: 4096"),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
            "rope_type: yarn",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor: 0.5",
        ),
    ],
)
def test_what_megatron_would_compute_in_another_way_is_named(kind, changes, named):
    with pytest.raises(ConfigError) as refused:
        translate(kind, **changes)
    assert named in str(refused.value)
    assert "learner.engine: fsdp2" in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 5}),
        ("qwen3", {"sliding_window": 8}),
        ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    ],
)
def test_what_has_no_effect_is_not_refused(kind, changes):
    translate(kind, **changes)


def test_other_kinds_are_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"model_type gemma3_text; it knows llama, mixtral, qwen2, qwen3, qwen3_moe"):
        family_of(AutoConfig.for_model("gemma3_text"))
