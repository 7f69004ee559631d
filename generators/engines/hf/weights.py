"""Putting new weights into a model in place.

Invariant: a set of tensors is checked as a whole before the first byte is copied, so that a model never holds a
mixture of two versions.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from mesh.errors import WeightsError


class InPlaceWeights:
    """The parameters and persistent buffers of a model as copy targets; tied names share one."""

    def __init__(self, model: nn.Module) -> None:
        self._targets: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
        self._names: dict[int, list[str]] = {}
        for name, target in self._targets.items():
            self._names.setdefault(id(target), []).append(name)

    def check(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of (target, source) for a complete set of tensors.

        Raises:
            WeightsError: a tensor is unknown, has another shape, or is missing; names it.
        """
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        missing = dict(self._names)
        for name, source in tensors:
            target = self._targets.get(name)
            if target is None:
                raise WeightsError(f"tensor {name!r} is not part of the model", hint="send Hugging Face names")
            if source.shape != target.shape:
                raise WeightsError(f"tensor {name!r} has shape {list(source.shape)}, expected {list(target.shape)}")
            missing.pop(id(target), None)
            pairs.append((target, source))
        if missing:
            names = sorted(names[0] for names in missing.values())
            raise WeightsError(f"{len(names)} tensors are missing, the first is {names[0]!r}")
        return pairs

    @staticmethod
    def copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copies checked pairs, converting the dtype where needed."""
        with torch.no_grad():
            for target, source in pairs:
                target.copy_(source)
