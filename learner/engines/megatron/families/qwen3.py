"""Qwen3: queries and keys are normalized, head by head."""

from __future__ import annotations

from typing import Any

from rollmesh.learner.engines.megatron.families.decoder import (
    ATTENTION,
    DENSE,
    ENDS,
    QK_NORM,
    decoder_settings,
    refuse_biases,
)
from rollmesh.learner.engines.megatron.families.family import Family, Settings


def _translate(config: Any) -> Settings:
    refuse_biases(config, "attention_bias")
    return decoder_settings(config, qk_norm=True)


QWEN3 = Family("qwen3", (*ENDS, *ATTENTION, *QK_NORM, *DENSE), _translate)
