"""The common part of the families: the rules of a decoder's weights, and the keys of its configuration."""

from __future__ import annotations

from typing import Any

from torch.nn import functional

from rollmesh.learner.engines.layer_kinds import layer_kinds
from rollmesh.learner.engines.megatron.families.family import Settings
from rollmesh.learner.engines.megatron.families.rope import rope_settings
from rollmesh.learner.engines.megatron.weight_rules import Form, Rule
from rollmesh.mesh.errors import ConfigError

ENDS = (
    Rule(("embedding.word_embeddings.weight",), ("model.embed_tokens.weight",), Form.VOCABULARY, "first"),
    Rule(("decoder.final_layernorm.weight",), ("model.norm.weight",), place="last"),
    Rule(("output_layer.weight",), ("lm_head.weight",), Form.VOCABULARY, "last"),
)
"""Embedding, last norm and output layer."""

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# Transformer Engine computes a norm together with the product that follows it, and the norm has that one's name then.
ATTENTION = (
    Rule(("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"), ("input_layernorm.weight",)),
    Rule(("self_attention.linear_qkv.weight",), tuple(f"{name}.weight" for name in _QKV), Form.QKV),
    Rule(("self_attention.linear_proj.weight",), ("self_attn.o_proj.weight",), Form.COLUMNS),
    Rule(("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"), ("post_attention_layernorm.weight",)),
)
"""A layer without its feed-forward part."""

QKV_BIAS = (Rule(("self_attention.linear_qkv.bias",), tuple(f"{name}.bias" for name in _QKV), Form.QKV),)

QK_NORM = (
    Rule(("self_attention.q_layernorm.weight",), ("self_attn.q_norm.weight",)),
    Rule(("self_attention.k_layernorm.weight",), ("self_attn.k_norm.weight",)),
)

DENSE = (
    Rule(("mlp.linear_fc1.weight",), ("mlp.gate_proj.weight", "mlp.up_proj.weight"), Form.GATE_UP),
    Rule(("mlp.linear_fc2.weight",), ("mlp.down_proj.weight",), Form.COLUMNS),
)

EXPERTS = (
    Rule(("mlp.router.weight",), ("mlp.gate.weight",)),
    Rule(
        ("mlp.experts.local_experts.{expert}.linear_fc1.weight", "mlp.experts.linear_fc1.weight{expert}"),
        ("mlp.experts.gate_up_proj",),
        Form.EXPERT_GATE_UP,
    ),
    Rule(
        ("mlp.experts.local_experts.{expert}.linear_fc2.weight", "mlp.experts.linear_fc2.weight{expert}"),
        ("mlp.experts.down_proj",),
        Form.EXPERT_DOWN,
    ),
)
"""Router and experts; the experts as a list of modules, or as Transformer Engine's single one."""


def decoder_settings(config: Any, *, qkv_bias: bool = False, qk_norm: bool = False) -> Settings:
    """The settings that all families have.

    Args:
        config: of transformers.
        qkv_bias: queries, keys and values have biases.
        qk_norm: queries and keys are normalized, head by head.

    Raises:
        ConfigError: Megatron would compute something in another way.
    """
    if config.hidden_act not in ("silu", "swish"):
        raise refusal("hidden_act", config.hidden_act, "silu")
    if other := set(layer_kinds(config)) - {"full_attention"}:
        raise refusal("layers with", ", ".join(sorted(other)), "full attention in every layer (sliding_window: null)")
    transformer = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "ffn_hidden_size": config.intermediate_size,
        "add_bias_linear": False,
        "add_qkv_bias": qkv_bias,
        "qk_layernorm": qk_norm,
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        # Dropout would make the current policy differ from the one with the compared log-probs.
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    model = {
        "max_sequence_length": config.max_position_embeddings,
        "share_embeddings_and_output_weights": bool(config.tie_word_embeddings),
        **rope_settings(config),
    }
    return Settings(transformer, model)


def expert_settings(
    *, experts: int, top_k: int, normalized: bool, hidden: int, layers: list[bool]
) -> dict[str, object]:
    """The settings of layers with experts, for `TransformerConfig`.

    Args:
        experts: of a layer.
        top_k: experts of a token.
        normalized: a token's weights for its experts sum to 1.
        hidden: width within an expert.
        layers: those that have experts.

    Raises:
        ConfigError: Megatron has no such router.
    """
    if top_k == 1 and normalized:
        raise refusal("one expert per token with", "a weight that is always 1", "num_experts_per_tok: 2 or more")
    return {
        "num_moe_experts": experts,
        "moe_router_topk": top_k,
        # A softmax over the chosen experts alone is the normalized softmax over all of them.
        "moe_router_pre_softmax": not normalized,
        "moe_router_score_function": "softmax",
        "moe_router_dtype": "fp32",
        "moe_ffn_hidden_size": hidden,
        "moe_layer_freq": [int(has) for has in layers],
    }


def refuse_biases(config: Any, *keys: str) -> None:
    """Refuses biases that Megatron has only together with others.

    Raises:
        ConfigError: one of the keys is set; names it.
    """
    for key in keys:
        if getattr(config, key):
            raise refusal(key, True, False)


def refusal(key: str, found: object, works: object) -> ConfigError:
    """The error for a key of a model's configuration that Megatron has no counterpart for."""
    return ConfigError(
        f"learner.engine: megatron cannot train this model: its config.json has {key}: {found}",
        hint=f"it trains {works}; for this model set learner.engine: fsdp2",
    )
