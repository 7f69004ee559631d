"""The families, by their name in transformers."""

from __future__ import annotations

from typing import Any

from rollmesh.learner.engines.megatron.families.family import Family
from rollmesh.learner.engines.megatron.families.llama import LLAMA
from rollmesh.learner.engines.megatron.families.mixtral import MIXTRAL
from rollmesh.learner.engines.megatron.families.qwen2 import QWEN2
from rollmesh.learner.engines.megatron.families.qwen3 import QWEN3
from rollmesh.learner.engines.megatron.families.qwen3_moe import QWEN3_MOE
from rollmesh.mesh.errors import ConfigError

FAMILIES = {family.model_type: family for family in (LLAMA, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE)}


def family_of(hf_config: Any) -> Family:
    """The family of a model.

    Args:
        hf_config: of transformers.

    Raises:
        ConfigError: there is none for its `model_type`.
    """
    family = FAMILIES.get(hf_config.model_type)
    if family is None:
        raise ConfigError(
            f"learner.engine: megatron does not know models of model_type {hf_config.model_type}; it knows "
            f"{', '.join(FAMILIES)}",
            hint="set learner.engine: fsdp2, which trains every architecture of docs/architectures.md",
        )
    return family
