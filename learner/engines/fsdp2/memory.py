"""An engine's memory in three parts, each on the device or at rest on the host: parameters, optimizer, gradients."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from rollmesh.learner.engines.fsdp2.optimizers.piecewise import PiecewiseState, pieces_of
from rollmesh.learner.engines.fsdp2.preparation.blocks import transformer_blocks
from rollmesh.learner.engines.fsdp2.preparation.fsdp import free_gathered
from rollmesh.learner.engines.offload import HostCopy, return_free_memory
from rollmesh.learner.engines.resting_parts import GRADIENTS, OPTIMIZER, PARAMS


class EngineMemory:
    """The memory of a model and its optimizer.

    Args:
        model: prepared for training or inference.
        optimizer: None: the model is not trained.
        device: of both.
        folder: see `HostCopy`.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, device: torch.device, folder: Path | None = None
    ) -> None:
        self._model = model
        self._device = device
        self._params = HostCopy(device, folder, constant=optimizer is None)
        self._gradients = HostCopy(device, folder)
        self._parts: dict[str, HostCopy | PiecewiseState] = {PARAMS: self._params, GRADIENTS: self._gradients}
        if optimizer is not None:
            pieces = pieces_of(model, transformer_blocks(model))
            self._state = self._parts[OPTIMIZER] = PiecewiseState(optimizer, pieces, device, folder)

    @property
    def resting_bytes(self) -> Mapping[str, int]:
        """Bytes of the parts that are on the host."""
        return {part: copy.nbytes for part, copy in self._parts.items()}

    def offload(self, parts: Collection[str]) -> None:
        """Moves parts to the host."""
        for part in self._of(parts):
            if part == PARAMS:
                free_gathered(self._model)
                self._params.to_host(self._model.parameters())
            elif part == GRADIENTS:
                gradients = (parameter.grad for parameter in self._model.parameters())
                self._gradients.to_host(gradient for gradient in gradients if gradient is not None)
            else:
                self._state.to_host()
        if parts:
            return_free_memory(self._device)

    def onload(self, parts: Collection[str]) -> None:
        """Brings parts back to the device."""
        for part in self._of(parts):
            self._parts[part].to_device()

    def step_by_pieces(self) -> None:
        """Takes the optimizer's step; its state is on the host afterwards, and gradients are gone."""
        self._state.step()
        return_free_memory(self._device)

    def require(self, *parts: str) -> None:
        """Refuses a call that needs parts which are at rest: torch would read freed memory."""
        if away := [part for part in self._of(parts) if self._parts[part].moved]:
            raise RuntimeError(f"{', '.join(away)} of the model are in host memory: call `onload` first")

    def forget_gradients(self) -> None:
        """Records that the gradients are gone."""
        self._gradients.forget()

    def _of(self, parts: Collection[str]) -> list[str]:
        """The existing parts among these: a model that is not trained has no optimizer."""
        return [part for part in parts if part in self._parts]
