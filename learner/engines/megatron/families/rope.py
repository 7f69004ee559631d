"""Rotary positions: which kinds Megatron-Core computes as transformers does."""

from __future__ import annotations

from typing import Any

from rollmesh.mesh.errors import ConfigError

# Megatron-Core 0.16.1 has them as constants in `RotaryEmbedding._apply_scaling`; its factor alone can be set.
_LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


def rope_settings(config: Any) -> dict[str, object]:
    """Keyword arguments of `GPTModel` for the rotary positions of a model.

    Args:
        config: of transformers.

    Raises:
        ConfigError: Megatron does not compute these positions; names the kind, or the number that is fixed.
    """
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "llama3"):
        raise _refusal(f"rope_type: {kind}", "rope_type default and llama3")
    fixed = {"partial_rotary_factor": 1} | (_LLAMA3 if kind == "llama3" else {})
    for key, value in fixed.items():
        if (found := rope.get(key, value)) != value:
            raise _refusal(f"{key}: {found}", f"{key}: {value}")
    settings: dict[str, object] = {"position_embedding_type": "rope", "rotary_base": rope["rope_theta"]}
    return settings | ({"rope_scaling": True, "rope_scaling_factor": rope["factor"]} if kind == "llama3" else {})


def _refusal(found: str, works: str) -> ConfigError:
    return ConfigError(
        f"learner.engine: megatron cannot train this model: the rope_parameters in its config.json have {found}",
        hint=f"it computes {works}; for this model set learner.engine: fsdp2",
    )
