"""The blocks of a model: its transformer layers."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """The layers: the elements of the largest module list. Those of a hybrid model are of several classes.

    The blocks of a vision part, within a vision-language model, are not among them.
    """
    vision = {id(module) for part in _vision_parts(model) for module in part.modules()}
    best: nn.ModuleList | None = None
    size = 0
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in vision:
            weight = sum(parameter.numel() for parameter in module.parameters())
            if weight > size:
                best, size = module, weight
    return list(best) if best is not None else []


def _vision_parts(model: nn.Module) -> list[nn.Module]:
    """Models within the model, of the configuration that it has for images."""
    inner = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    configs = {id(vision) for part in inner if (vision := getattr(part.config, "vision_config", None)) is not None}
    return [part for part in inner if id(part.config) in configs]
