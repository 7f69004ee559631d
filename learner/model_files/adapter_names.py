"""Names of an adapter's tensors, next to those of the model: as engines and checkpoints have them, and as peft writes
them.
"""

from __future__ import annotations

from rollmesh.learner.model_files.value_head import HEAD
from rollmesh.mesh.weights.adapter import PEFT_PREFIX

NAME = "default"
"""The one adapter of a model."""
A_END, B_END = f".lora_A.{NAME}.weight", f".lora_B.{NAME}.weight"
"""Ends of the names of A, [rank, in], and B, [out, rank]."""


def adapted_layer(name: str) -> str | None:
    """The layer to which a tensor of an adapter belongs; None for any other tensor."""
    for end in (A_END, B_END):
        if name.endswith(end):
            return name.removesuffix(end)
    return None


def is_adapter(name: str) -> bool:
    """True for a tensor of an adapter."""
    return adapted_layer(name) is not None


def is_trained_with_adapters(name: str) -> bool:
    """True for a tensor that training changes where a model has adapters: theirs, and the head of a value model."""
    return is_adapter(name) or name.startswith(f"{HEAD}.")


def peft_name(name: str) -> str:
    """The name in a folder that peft writes: without that of the adapter, which is its folder's."""
    return PEFT_PREFIX + name.replace(f".{NAME}.weight", ".weight")
