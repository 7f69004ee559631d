"""The engine's memory in three parts, each on the device or at rest on the host: parameters, optimizer, gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from rollmesh.learner.engines.offload import HostCopy, return_free_memory
from rollmesh.learner.engines.resting_parts import GRADIENTS, OPTIMIZER


class MegatronMemory:
    """The memory of a model and its optimizer.

    Args:
        tensors: gives the tensors of each part as they are at present.
        device: of all.
        folder: see `HostCopy`.
    """

    def __init__(
        self, tensors: dict[str, Callable[[], Iterable[Tensor]]], device: torch.device, folder: Path | None = None
    ) -> None:
        self._tensors, self._device = tensors, device
        # A model without an optimizer never changes.
        self._copies = {part: HostCopy(device, folder, constant=OPTIMIZER not in tensors) for part in tensors}

    @property
    def resting_bytes(self) -> Mapping[str, int]:
        """Bytes of the parts that are on the host."""
        return {part: copy.nbytes for part, copy in self._copies.items()}

    def offload(self, parts: Collection[str]) -> None:
        """Moves parts to the host."""
        for part in self._of(parts):
            self._copies[part].to_host(self._tensors[part]())
        if parts:
            return_free_memory(self._device)

    def onload(self, parts: Collection[str]) -> None:
        """Brings parts back to the device."""
        for part in self._of(parts):
            self._copies[part].to_device()

    def require(self, *parts: str) -> None:
        """Refuses a call that needs parts which are at rest: torch would read freed memory."""
        if away := [part for part in self._of(parts) if self._copies[part].moved]:
            raise RuntimeError(f"{', '.join(away)} of the model are in host memory: call `onload` first")

    def forget_gradients(self) -> None:
        """Records that the gradients are gone."""
        if GRADIENTS in self._copies:
            self._copies[GRADIENTS].forget()

    def _of(self, parts: Collection[str]) -> list[str]:
        """The existing parts among these: a model that is not trained has parameters alone."""
        return [part for part in parts if part in self._tensors]
