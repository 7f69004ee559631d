"""Tiny random models of the architectures under test, and random batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from learner.batching.types import TrainSequence
from learner.engines.base import EngineSpec
from learner.engines.registry import create_engine
from mesh.config.models import ModelSection, OptimizerSection

VOCAB = 48
# Of an export in small buckets: less than any of the models has, by far.
EXPORT_BUCKET_BYTES = 9000
_COMMON = {"vocab_size": VOCAB, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SMALL = {
    **_COMMON,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
ARCHITECTURES: dict[str, dict[str, object]] = {
    "qwen3": {**_SMALL, "tie_word_embeddings": True},
    "llama": {**_SMALL, "tie_word_embeddings": False},
    "gemma3_text": {
        **_SMALL,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
    },
    "gemma2": {
        **_SMALL,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "gpt2": {**_COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "qwen3_moe": {
        **_SMALL,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
    },
}


def make_model(folder: Path, architecture: str, seed: int = 0) -> Path:
    """Writes a random model of an architecture; weights large enough that attention matters."""
    torch.manual_seed(seed)
    config: PretrainedConfig = AutoConfig.for_model(architecture, **ARCHITECTURES[architecture])
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    return folder


def make_spec(folder: Path, **changes: object) -> EngineSpec:
    """A float32 CPU engine with a large learning rate."""
    values: dict[str, object] = {
        "model": ModelSection(path=str(folder)),
        "optimizer": OptimizerSection(lr=1e-2, max_grad_norm=1e9),
        "total_steps": 10,
    }
    return EngineSpec(**(values | changes))


def make_engine(folder: Path, **changes: object):
    """A language model's engine from `make_spec`."""
    return create_engine(make_spec(folder, **changes))


def make_critic(folder: Path, **changes: object):
    """A value model's engine from `make_spec`."""
    return create_engine(make_spec(folder, **changes), model_type="value_model")


def make_frozen(folder: Path, **changes: object):
    """A language model that is not trained."""
    return create_engine(make_spec(folder, optimizer=None, **changes))


def make_sequences(
    seed: int, groups: int = 4, members: int = 3, longest: int = 12, gaps: bool = True
) -> list[TrainSequence]:
    """Groups of random sequences that share their prompts; responses of 1 .. longest tokens, some masked in between."""
    rng = np.random.default_rng(seed)
    sequences = []
    for _ in range(groups):
        prompt = rng.integers(3, VOCAB, rng.integers(1, 9)).astype(np.int32)
        for _ in range(members):
            count = int(rng.integers(1, longest + 1))
            mask = np.ones(count, dtype=np.uint8)
            if gaps and count > 3:
                mask[rng.integers(0, count, 2)] = 0
            sequences.append(
                TrainSequence(
                    prompt,
                    rng.integers(3, VOCAB, count).astype(np.int32),
                    mask,
                    rng.normal(-3.0, 0.5, count).astype(np.float32),
                    float(rng.normal()),
                    int(rng.integers(0, 4)),
                )
            )
    return sequences
