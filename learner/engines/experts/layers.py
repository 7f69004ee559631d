"""Experts of a model, and the layers that have them, by the model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmesh.learner.engines.model_cost import EXPERTS
from rollmesh.learner.model_files.checks import text_section


def layers_with_experts(config: Mapping[str, Any]) -> list[bool]:
    """For each layer whether it has experts; the others have one MLP.

    Args:
        config: of a model with experts, keys as Hugging Face names them. Most families have them in all layers.
    """
    dense, step = config.get("mlp_only_layers") or (), config.get("decoder_sparse_step") or 1
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(config.get("num_hidden_layers") or 0)]


def expert_count(config: Mapping[str, Any]) -> int:
    """The experts of a layer that has some; 0: no layer has.

    Args:
        config: as Hugging Face names its keys, of the whole model or of its text part.
    """
    text = text_section(config)
    # A list has a size for each layer.
    count = next((size for size in map(text.get, EXPERTS) if isinstance(size, int) and size), 0)
    return count if not text.get("num_hidden_layers") or any(layers_with_experts(text)) else 0
