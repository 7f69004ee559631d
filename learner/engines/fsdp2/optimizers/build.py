"""The optimizer of a model as configured, with parameters in groups that it treats alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from rollmesh.learner.engines.fsdp2.optimizers.clipping import mesh_of
from rollmesh.learner.engines.fsdp2.optimizers.muon import Muon
from rollmesh.learner.engines.fsdp2.optimizers.quantized_adamw import QuantizedAdamW
from rollmesh.learner.engines.fsdp2.optimizers.rounded_adamw import RoundedAdamW
from rollmesh.mesh.config.learner import OptimizerSection


def build_optimizer(section: OptimizerSection, model: nn.Module, blocks: Iterable[nn.Module]) -> Optimizer:
    """The optimizer of all trained parameters.

    Matrices decay; norms, biases and other vectors do not, as is usual, also where a model stores several vectors as
    one matrix. Muon takes the matrices of the layers alone. Embeddings and the output layer are AdamW's, as its authors
    advise.

    Args:
        section: names the optimizer.
        model: sharded, or not where there is one rank.
        blocks: its layers.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    vectors = _vectors(model)
    hidden = _hidden_matrices(blocks) - vectors if section.name == "muon" else set()
    apart = vectors | hidden
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if id(p) not in apart]},
        {"params": [p for p in trained if id(p) in vectors], "weight_decay": 0.0},
        {"params": [p for p in trained if id(p) in hidden], "momentum": section.momentum},
    ]
    # Torch's optimizers compute with parameters of one mesh at a time.
    groups = [part for group in groups for part in _by_mesh(group)]
    common: dict[str, Any] = {
        "lr": section.lr,
        "betas": section.betas,
        "eps": section.eps,
        "weight_decay": section.weight_decay,
    }
    if section.name == "muon":
        return Muon(groups, **common)
    compact = {"bfloat16": RoundedAdamW, "8bit": QuantizedAdamW}
    if section.state_dtype in compact:
        return compact[section.state_dtype](groups, **common)
    return torch.optim.AdamW(groups, fused=True, **common)


def _by_mesh(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A group in parts that are sharded over one mesh each."""
    parts: dict[object, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        parts.setdefault(mesh_of(parameter), []).append(parameter)
    for parameters in parts.values():
        yield {**group, "params": parameters}


def _vectors(model: nn.Module) -> set[int]:
    """Identities of weights that no input is multiplied with as with a matrix.

    Some models store several as the rows of one: biases of experts, norms of heads, decay rates of recurrent layers.
    """
    return {
        id(parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() <= 1 or name.endswith(("bias", "A_log")) or "norm" in type(module).__name__.lower()
    }


def _hidden_matrices(blocks: Iterable[nn.Module]) -> set[int]:
    """Identities of the layers' weights that multiply: matrices, and stacks of them (experts)."""
    found = set()
    for block in blocks:
        for module in block.modules():
            # Kernels of a convolution are three-dimensional as well.
            if not isinstance(module, nn.Conv1d):
                found |= {id(p) for p in module.parameters(recurse=False) if p.dim() in (2, 3) and p.requires_grad}
    return found
