"""The first values of adapters, and weights with adapters merged in: the same for every engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload
from zlib import crc32

import torch
from torch import Tensor, nn

from rollmesh.learner.model_files.adapter_names import A_END
from rollmesh.mesh.weights.merging import merge


def first_values(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """The full matrix with which an adapter begins, float32, whatever the division and the engine.

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
