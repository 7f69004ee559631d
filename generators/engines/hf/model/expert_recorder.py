"""The experts to which a model routes tokens, recorded as its layers call them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rollmesh.generators.engines.errors import EngineSettingsError

# Attributes that transformers gives to experts which are called with the choice of each token.
_MARKS = ("num_experts", "is_transposed", "is_concatenated")
# Experts whose numbers fit into a byte.
_BYTE = 256

Experts = NDArray[np.generic]


class ExpertRecorder:
    """Records the experts of each token.

    Args:
        model: with experts.

    Raises:
        EngineSettingsError: the model has no experts that can be recorded.
    """

    def __init__(self, model: nn.Module) -> None:
        layers: list[Any] = [m for m in model.modules() if all(hasattr(m, mark) for mark in _MARKS)]
        if not layers:
            raise EngineSettingsError(
                "rollout.hf.routed_experts: the model has no experts whose choice can be recorded", hint="leave it out"
            )
        self._layers = len(layers)
        self._seen: list[torch.Tensor] | None = None
        self._dtype = np.uint8 if max(layer.num_experts for layer in layers) <= _BYTE else np.int16
        for layer in layers:
            layer.register_forward_pre_hook(self._see, with_kwargs=True)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records one forward pass, which begins within the context."""
        self._seen = []
        try:
            yield
        finally:
            self._seen = None

    def taken(self) -> Experts:
        """The experts of the pass so far, in the order of its tokens: [T, layers, K]; more may follow."""
        assert self._seen is not None
        seen, self._seen = self._seen, []
        assert len(seen) == self._layers, f"{len(seen)} of {self._layers} layers were called"
        experts: Experts = torch.stack(seen, 1).cpu().numpy().astype(self._dtype)
        return experts

    def _see(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._seen is not None:
            self._seen.append(kwargs["top_k_index"] if "top_k_index" in kwargs else args[1])
