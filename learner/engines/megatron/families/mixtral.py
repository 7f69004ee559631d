"""Mixtral: experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rollmesh.learner.engines.megatron.families.decoder import (
    ATTENTION,
    ENDS,
    EXPERTS,
    decoder_settings,
    expert_settings,
)
from rollmesh.learner.engines.megatron.families.family import Family, Settings


def _translate(config: Any) -> Settings:
    settings = decoder_settings(config)
    experts = expert_settings(
        experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        normalized=True,
        hidden=config.intermediate_size,
        layers=[True] * config.num_hidden_layers,
    )
    return replace(settings, transformer=settings.transformer | experts)


MIXTRAL = Family("mixtral", (*ENDS, *ATTENTION, *EXPERTS), _translate)
