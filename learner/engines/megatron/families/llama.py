"""Llama 2 and 3, and models of that kind."""

from __future__ import annotations

from typing import Any

from rollmesh.learner.engines.megatron.families.decoder import (
    ATTENTION,
    DENSE,
    ENDS,
    decoder_settings,
    refuse_biases,
)
from rollmesh.learner.engines.megatron.families.family import Family, Settings


def _translate(config: Any) -> Settings:
    refuse_biases(config, "attention_bias", "mlp_bias")
    return decoder_settings(config)


LLAMA = Family("llama", (*ENDS, *ATTENTION, *DENSE), _translate)
