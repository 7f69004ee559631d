"""Layers of a mixture of experts that have experts, by the model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def layers_with_experts(config: Mapping[str, Any]) -> list[bool]:
    """For each layer whether it has experts; the others have one MLP.

    Args:
        config: of a model with experts, keys as Hugging Face names them. Most families have them in all layers.
    """
    dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(config.get("num_hidden_layers") or 0)]
