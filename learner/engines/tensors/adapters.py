"""The first values of adapters, and weights with adapters merged in: the same for every engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import overload
from zlib import crc32

import torch
from torch import Tensor, nn

from rollmesh.learner.model_files.adapter_folder import FolderAdapter
from rollmesh.learner.model_files.adapter_names import A_END, adapted_layer
from rollmesh.mesh.config.lora import LoraSection
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.weights.merging import merge


class AdapterStart:
    """The values with which an adapter begins: new ones, or those of a folder that peft has written.

    Args:
        section: of the adapter that is trained.
        shapes: of all its full matrices, by name.
        seed: of the run.

    Raises:
        DataError: the folder cannot be read, or holds an adapter of another rank, scale, or of other layers.
    """

    def __init__(self, section: LoraSection, shapes: Mapping[str, Sequence[int]], seed: int) -> None:
        self._shapes, self._seed = shapes, seed
        self._stored = None if section.start_from is None else FolderAdapter(section.start_from)
        if self._stored is not None:
            self._check(self._stored, section)

    def values(self, name: str) -> Tensor:
        """A full matrix, float32 on the CPU."""
        layer = adapted_layer(name)
        if self._stored is None or layer is None:
            return first_values(name, self._shapes[name], self._seed)
        a, b = self._stored.read(layer)
        found = a if name.endswith(A_END) else b
        if tuple(found.shape) != tuple(self._shapes[name]):
            shapes = f"{list(found.shape)}, and learner.lora asks for {list(self._shapes[name])}"
            raise DataError(f"{self._stored.origin}: {name} has shape {shapes}", hint="set learner.lora.rank as it has")
        return found

    def _check(self, stored: FolderAdapter, section: LoraSection) -> None:
        stored.check_scale(section)
        own = {layer for name in self._shapes if (layer := adapted_layer(name)) is not None}
        if others := sorted(own ^ stored.layers):
            which = "has no adapter of" if others[0] in own else "has an adapter of"
            raise DataError(f"{stored.origin} {which} {others[0]}", hint="set learner.lora.targets as it has them")


def first_values(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """The full matrix with which a new adapter begins, float32, whatever the division and the engine.

    A is drawn as peft draws it (Kaiming, uniform, with a = sqrt(5)), B is zero.

    Args:
        name: of the matrix, with its layer's.
        shape: of the full matrix.
        seed: of the run.
    """
    if not name.endswith(A_END):
        return torch.zeros(*shape)
    generator = torch.Generator().manual_seed(seed * (1 << 32) + crc32(name.encode()))
    full = torch.empty(*shape)
    nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
    return full


@dataclass(frozen=True, slots=True)
class MergedParts(Sequence[Tensor]):
    """Parts of a weight, each merged again for every use: W + s B A, float32.

    Attributes:
        parts: of the weight, [rows, columns] each.
        factors: for each of them the columns of A, [rank, columns], and the rows of B, [rows, rank].
        scale: of the products.
    """

    parts: Sequence[Tensor]
    factors: Sequence[tuple[Tensor, Tensor]]
    scale: float

    def __len__(self) -> int:
        return len(self.parts)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        a, b = self.factors[index]
        return merge(self.parts[index], a, b, self.scale)
