"""A folder with an adapter as peft writes and reads it; vLLM and SGLang read it too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from rollmesh.mesh.weights.adapter import PEFT_A, PEFT_PREFIX

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"


def write_peft_folder(
    folder: Path,
    factors: Mapping[str, Tensor],
    *,
    alpha: float,
    rslora: bool,
    base: str,
    head: tuple[str, Tensor] | None = None,
) -> None:
    """Writes an adapter.

    Args:
        folder: exists, and is empty.
        factors: A and B by peft's names, on the CPU; one rank for all.
        alpha: products are multiplied by alpha / rank.
        rslora: they are multiplied by alpha / sqrt(rank) instead.
        base: folder or hub id of the model to which it belongs; empty: not said.
        head: of a sequence classifier, trained whole: the name of its layer, and the weight.

    Raises:
        OSError: the folder cannot be written to.
    """
    config = peft_config(factors, alpha=alpha, rslora=rslora, base=base)
    tensors = dict(factors)
    if head is not None:
        layer, weight = head
        config |= {"task_type": "SEQ_CLS", "modules_to_save": [layer]}
        tensors[f"{PEFT_PREFIX}{layer}.weight"] = weight
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS_NAME)


def peft_config(factors: Mapping[str, Tensor], *, alpha: float, rslora: bool, base: str) -> dict[str, Any]:
    """The description of an adapter, as in peft's file; see `write_peft_folder`."""
    adapted = {name.removesuffix(PEFT_A): a for name, a in factors.items() if name.endswith(PEFT_A)}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": rank_of(factors),
        "lora_alpha": alpha,
        "use_rslora": rslora,
        # Whole names: the last part alone might be that of another layer as well.
        "target_modules": sorted(layer.removeprefix(PEFT_PREFIX) for layer in adapted),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def rank_of(factors: Mapping[str, Tensor]) -> int:
    """The rank of an adapter, which is that of all its layers."""
    (rank,) = {int(tensor.shape[0]) for name, tensor in factors.items() if name.endswith(PEFT_A)}
    return rank
