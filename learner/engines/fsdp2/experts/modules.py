"""The experts of a model and their routers, as transformers builds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

# Attributes that transformers gives to experts which compute by an exchangeable function.
_MARKS = ("num_experts", "is_transposed", "is_concatenated", "has_post_expert_norm")


@dataclass(frozen=True, slots=True)
class ExpertLayer:
    """The experts of one layer.

    Attributes:
        name: of the module in the model.
        module: of the experts. Their weights are stacks, [E, ...]. It is called with hidden states [T, H], chosen
            experts [T, K] and their weights [T, K]. The weights multiply what experts give.
    """

    name: str
    module: nn.Module

    @property
    def experts(self) -> int:
        """The number of all experts of the layer, E."""
        module: Any = self.module
        return max(module.num_experts, *(len(parameter) for parameter in module.parameters()))


def expert_layers(model: nn.Module) -> list[ExpertLayer]:
    """The layers with experts, in the order of the model; those that transformers computes in another way are not."""
    return [
        ExpertLayer(name, module)
        for name, module in model.named_modules()
        if all(hasattr(module, mark) for mark in _MARKS)
    ]


def why_undividable(layer: ExpertLayer) -> str:
    """The reason why experts of a layer cannot be on different ranks; empty: they can."""
    module: Any = layer.module
    if module.has_post_expert_norm:
        return f"{layer.name} has a norm that all experts share"
    if any(parameter.dim() < 2 or len(parameter) != layer.experts for parameter in module.parameters()):
        return f"{layer.name} has weights that all experts share"
    return ""
