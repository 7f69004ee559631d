"""The base with its adapter merged in, as it leaves an engine: W + s B A, a rank's rows at a time.

Invariant: in addition to the model, a process holds the A matrices of all layers and one merged part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import overload

from torch import Tensor
from torch.distributed.tensor import DTensor

from rollmesh.learner.engines.fsdp2.lora.layers import pairs
from rollmesh.learner.engines.fsdp2.shards import divided_tensors
from rollmesh.learner.engines.tensors.divided_tensor import DividedTensor
from rollmesh.learner.model_files.adapter_names import is_adapter

_WEIGHT = ".weight"


def gather_factors(named: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    """The whole A of every adapted layer, and this process's rows of B; collective.

    Args:
        named: all tensors by plain name.
    """
    return {layer: (_whole(a.detach()), _local(b.detach())) for layer, (a, b) in pairs(iter(named)).items()}


def merged_tensors(
    named: Iterable[tuple[str, Tensor]], processes: int, scale: float, factors: Mapping[str, tuple[Tensor, Tensor]]
) -> Iterator[DividedTensor]:
    """The tensors of the base, those of adapted layers merged as they are read.

    Args:
        named, processes: as for `divided_tensors`.
        scale: of the products.
        factors: of `gather_factors`; empty: shapes and places are wanted alone.
    """
    for tensor in divided_tensors(((name, found) for name, found in named if not is_adapter(name)), processes):
        factor = factors.get(tensor.name.removesuffix(_WEIGHT)) if tensor.name.endswith(_WEIGHT) else None
        yield tensor if factor is None else replace(tensor, local=_Merged(tensor.local, *factor, scale))


@dataclass(frozen=True, slots=True)
class _Merged(Sequence[Tensor]):
    """The one part of a weight, merged again for each use."""

    parts: Sequence[Tensor]
    a: Tensor
    b: Tensor
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
        # In float32: the sum of a large and a small number loses the small one.
        return self.parts[index].float().addmm(self.b.float(), self.a.float(), alpha=self.scale)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
