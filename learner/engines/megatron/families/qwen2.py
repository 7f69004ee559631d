"""Qwen2 and Qwen2.5: queries, keys and values have biases."""

from __future__ import annotations

from functools import partial

from rollmesh.learner.engines.megatron.families.decoder import ATTENTION, DENSE, ENDS, QKV_BIAS, decoder_settings
from rollmesh.learner.engines.megatron.families.family import Family

QWEN2 = Family("qwen2", (*ENDS, *ATTENTION, *QKV_BIAS, *DENSE), partial(decoder_settings, qkv_bias=True))
