"""Qwen3 with experts, in all layers or in some."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollmesh.learner.engines.experts.layers import layers_with_experts
from rollmesh.learner.engines.megatron.families.decoder import (
    ATTENTION,
    DENSE,
    ENDS,
    EXPERTS,
    QK_NORM,
    decoder_settings,
    expert_settings,
    refuse_biases,
)
from rollmesh.learner.engines.megatron.families.family import Family, Settings


def _translate(config: Any) -> Settings:
    refuse_biases(config, "attention_bias")
    settings = decoder_settings(config, qk_norm=True)
    sparse = layers_with_experts(config.to_dict())
    if not config.num_experts or not any(sparse):
        return settings
    experts = expert_settings(
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        normalized=config.norm_topk_prob,
        hidden=config.moe_intermediate_size,
        layers=sparse,
    )
    return replace(settings, transformer=settings.transformer | experts)


QWEN3_MOE = Family("qwen3_moe", (*ENDS, *ATTENTION, *QK_NORM, *DENSE, *EXPERTS), _translate)
