"""An engine's memory in three parts, each on the device or at rest on the host: parameters, optimizer, gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from rollmesh.learner.engines.fsdp2.preparation.fsdp import free_gathered
from rollmesh.learner.engines.offload import HostCopy

PARAMS, OPTIMIZER, GRADIENTS = "params", "optimizer", "gradients"


class EngineMemory:
    """The memory of a model and its optimizer.

    Args:
        model: prepared for training or inference.
        optimizer: None: the model is not trained.
        device: of both.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, device: torch.device) -> None:
        self._model = model
        self._optimizer = optimizer
        self._parts = {part: HostCopy(device) for part in (PARAMS, OPTIMIZER, GRADIENTS)}

    def offload(self, parts: Iterable[str]) -> None:
        """Moves parts to the host."""
        for part in parts:
            if part == PARAMS:
                free_gathered(self._model)
            self._parts[part].to_host(self._tensors(part))

    def onload(self, parts: Iterable[str]) -> None:
        """Brings parts back to the device."""
        for part in parts:
            self._parts[part].to_device()

    def require(self, *parts: str) -> None:
        """Refuses a call that needs parts which are at rest: torch would read freed memory."""
        if away := [part for part in parts if self._parts[part].moved]:
            raise RuntimeError(f"{', '.join(away)} of the model are in host memory: call `onload` first")

    def forget_gradients(self) -> None:
        """Notes that there are no gradients any more."""
        self._parts[GRADIENTS].forget()

    def _tensors(self, part: str) -> list[Tensor]:
        if part == PARAMS:
            return list(self._model.parameters())
        if part == GRADIENTS:
            return [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        # Single numbers stay: each would be a copy of its own, and gives back nothing.
        return [value for state in states for value in state.values() if isinstance(value, Tensor) and value.dim()]
