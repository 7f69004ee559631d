"""The blocks of a model: its transformer layers."""

from __future__ import annotations

from torch import nn


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The layers: the elements of the largest module list. Those of a hybrid model are of several classes."""
    best: nn.ModuleList | None = None
    size = 0
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            weight = sum(parameter.numel() for parameter in module.parameters())
            if weight > size:
                best, size = module, weight
    return list(best) if best is not None else []
