"""The families, by their name in transformers."""

from __future__ import annotations

from typing import Any

from rollmesh.learner.engines.megatron.families.family import Family
from rollmesh.learner.engines.megatron.families.llama import LLAMA
from rollmesh.learner.engines.megatron.families.mixtral import MIXTRAL
from rollmesh.learner.engines.megatron.families.qwen2 import QWEN2
from rollmesh.learner.engines.megatron.families.qwen3 import QWEN3
from rollmesh.learner.engines.megatron.families.qwen3_moe import QWEN3_MOE
from rollmesh.learner.vision.families import FAMILIES as WITH_IMAGES
from rollmesh.mesh.errors import ConfigError

FAMILIES = {family.model_type: family for family in (LLAMA, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE)}


def family_of(hf_config: Any) -> Family:
    """The family of a model.

    Args:
        hf_config: of transformers.

    Raises:
        ConfigError: there is none for its `model_type`.
    """
    check_model_type(hf_config.model_type)
    return FAMILIES[hf_config.model_type]


def check_model_type(model_type: object, key: str = "learner.engine") -> None:
    """Refuses models of other families.

    Args:
        model_type: of the model's configuration.
        key: of the configuration that names the engine.

    Raises:
        ConfigError: names the families that there are.
    """
    if model_type in WITH_IMAGES:
        raise ConfigError(
            f"{key}: megatron trains text alone: its stages have no vision part, and models of model_type {model_type} "
            "take images",
            hint=f"set {key}: fsdp2, which trains them",
        )
    if model_type not in FAMILIES:
        raise ConfigError(
            f"{key}: megatron does not know models of model_type {model_type}; it knows {', '.join(FAMILIES)}",
            hint=f"set {key}: fsdp2, which trains every architecture of docs/architectures.md",
        )
