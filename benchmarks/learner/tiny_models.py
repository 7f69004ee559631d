"""Tiny random models of many architectures: every kind of layer that language models of transformers are made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

VOCABULARY = 64
_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SMALL = _BASE | {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_HEADS = _SMALL | {"head_dim": 8}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
_SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_DEEPSEEK = (
    _SMALL
    | _LATENT
    | {
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
    }
)
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model type of transformers, and the settings that make it tiny.

    Attributes:
        kind: what its layers are.
        settings: of its configuration.
    """

    kind: str
    settings: dict[str, Any]


_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_GRID_TOWER = {"depth": 2, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
_ON_GRIDS = {
    "text_config": _SMALL
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
    "image_token_id": 3,
    "video_token_id": 4,
    "vision_start_token_id": 5,
    "vision_end_token_id": 6,
    "tie_word_embeddings": False,
}


ARCHITECTURES: dict[str, Architecture] = {
    "qwen2": Architecture("attention", _SMALL),
    "qwen3": Architecture("attention", _HEADS | {"tie_word_embeddings": True}),
    "llama": Architecture("attention", _HEADS),
    "gpt2": Architecture("attention, learned positions", _BASE | {"n_embd": 32, "n_layer": 2, "n_head": 4}),
    "opt": Architecture(
        "attention, learned positions",
        _BASE
        | {
            "hidden_size": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
        },
    ),
    "gpt_neox": Architecture("attention, parallel layers", _SMALL),
    "olmo2": Architecture("attention, norms after layers", _SMALL),
    "glm4": Architecture("attention, partly rotated", _HEADS),
    "mistral": Architecture("sliding attention", _HEADS | {"sliding_window": 4}),
    "gemma2": Architecture(
        "sliding attention, capped scores",
        _HEADS | _SLIDING | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3_text": Architecture("sliding attention", _HEADS | _SLIDING | {"query_pre_attn_scalar": 8}),
    "gemma3n_text": Architecture(
        "sliding attention, sparse activations",
        _HEADS
        | _SLIDING
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        },
    ),
    "cohere2": Architecture("sliding attention, no positions in between", _HEADS | _SLIDING),
    "nemotron": Architecture("attention, partly rotated", _HEADS),
    "phi3": Architecture("attention", _SMALL),
    "smollm3": Architecture("attention, some layers without positions", _SMALL),
    "exaone4": Architecture("sliding attention, norms after layers", _HEADS | _SLIDING),
    "mixtral": Architecture("experts", _SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": Architecture("experts", _HEADS | _EXPERTS),
    "phimoe": Architecture(
        "sliding attention, experts",
        _SMALL | {"num_hidden_layers": 4, "num_local_experts": 16, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "olmoe": Architecture("experts", _SMALL | {"num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": Architecture("latent attention, experts", _DEEPSEEK | {"first_k_dense_replace": 1}),
    "deepseek_v32": Architecture(
        "indexed attention, experts", _DEEPSEEK | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
    ),
    "gpt_oss": Architecture(
        "attention with sinks, experts", _HEADS | _SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2}
    ),
    "llama4_text": Architecture(
        "chunked attention, experts",
        _HEADS
        | {
            "attention_chunk_size": 4,
            "num_local_experts": 2,
            "intermediate_size_mlp": 64,
            "interleave_moe_layer_step": 1,
        },
    ),
    "bloom": Architecture("own attention (alibi)", _BASE | {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "falcon": Architecture(
        "own attention (alibi)",
        _BASE
        | {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "alibi": True,
            "new_decoder_architecture": False,
        },
    ),
    "mpt": Architecture(
        "own attention (alibi)",
        {"vocab_size": VOCABULARY, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    ),
    "gptj": Architecture(
        "own attention", _BASE | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
    ),
    "qwen3_next": Architecture(
        "linear attention, experts", _HEADS | _DELTA_NET | _EXPERTS | {"shared_expert_intermediate_size": 16}
    ),
    "qwen3_5_text": Architecture("linear attention", _HEADS | _DELTA_NET),
    "olmo_hybrid": Architecture("linear attention", _HEADS | _DELTA_NET),
    "minimax": Architecture(
        "linear attention, experts",
        _HEADS
        | {
            "layer_types": ["linear_attention", "full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "block_size": 8,
        },
    ),
    "lfm2": Architecture("short convolutions", _SMALL | {"layer_types": ["conv", "full_attention"]}),
    "mamba": Architecture("state space", _BASE | {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "mamba2": Architecture(
        "state space",
        _BASE
        | {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "num_heads": 4,
            "head_dim": 16,
            "n_groups": 1,
            "chunk_size": 8,
        },
    ),
    "falcon_h1": Architecture("state space next to attention", _HEADS | _MAMBA2 | {"mamba_d_ssm": 64}),
    "bamba": Architecture("state space and attention", _SMALL | _MAMBA2 | {"attn_layer_indices": [1]}),
    "granitemoehybrid": Architecture(
        "state space and attention, experts",
        _SMALL
        | _MAMBA2
        | {
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
        },
    ),
    "jamba": Architecture(
        "state space and attention, experts",
        _SMALL
        | {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "zamba2": Architecture(
        "state space, shared attention",
        _SMALL
        | {
            "num_key_value_heads": 4,
            "mamba_d_state": 8,
            "mamba_headdim": 16,
            "n_mamba_heads": 4,
            "mamba_ngroups": 1,
            "layers_block_type": ["mamba", "hybrid"],
            "num_mem_blocks": 1,
            "use_mamba_kernels": False,
        },
    ),
    "recurrent_gemma": Architecture(
        "recurrence and sliding attention",
        _SMALL | {"attention_window_size": 4, "block_types": ["recurrent", "attention"], "lru_width": 32},
    ),
    "nemotron_h": Architecture(
        "state space and attention",
        _HEADS
        | {
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 8,
            "use_mamba_kernels": False,
        },
    ),
    "xlstm": Architecture(
        "recurrence",
        _BASE | {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "chunk_size": 8},
    ),
    "rwkv": Architecture(
        "recurrence",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "attention_hidden_size": 32,
            "intermediate_size": 64,
            "context_length": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}


WITH_IMAGES: dict[str, Architecture] = {
    "llava": Architecture(
        "attention, images",
        {
            "text_config": _HEADS | {"model_type": "llama"},
            "vision_config": _TOWER | {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4},
            "image_token_index": 3,
            "tie_word_embeddings": False,
        },
    ),
    "idefics3": Architecture(
        "attention, images",
        {
            "text_config": _HEADS | {"model_type": "llama"},
            "vision_config": _TOWER | {"image_size": 8, "patch_size": 4},
            "image_token_id": 3,
            "scale_factor": 1,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2_vl": Architecture(
        "attention, images on grids",
        _ON_GRIDS | {"vision_config": _GRID_TOWER | {"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}},
    ),
    "qwen2_5_vl": Architecture(
        "attention, images on grids",
        _ON_GRIDS
        | {
            "vision_config": _GRID_TOWER
            | {
                "hidden_size": 32,
                "intermediate_size": 64,
                "window_size": 16,
                "fullatt_block_indexes": [1],
                "out_hidden_size": 32,
            }
        },
    ),
}
"""The same with a vision part; token 3 stands for a feature of an image."""


def save_model(folder: Path, architecture: str, *, seed: int = 0, **settings: object) -> Path:
    """Writes a random model; its weights are so large that every layer matters.

    Args:
        folder: to write.
        architecture: one of `ARCHITECTURES` or `WITH_IMAGES`.
        seed: of the weights.
        settings: of the configuration, in place of the architecture's.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        known = (ARCHITECTURES | WITH_IMAGES)[architecture].settings
        config: PretrainedConfig = AutoConfig.for_model(architecture, **known | settings)
        factory = AutoModelForImageTextToText if architecture in WITH_IMAGES else AutoModelForCausalLM
        model = factory.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4.0)
    model.save_pretrained(folder)
    return folder
