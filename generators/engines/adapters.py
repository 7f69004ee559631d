"""A policy that is a low-rank adapter next to a base, as engines get it that compute with both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """The shape of all adapters of a run, which an engine needs before the first.

    Attributes:
        rank: of the products.
        targets: last parts of the names of the layers that have one; empty: all linear layers of the model's blocks.
    """

    rank: int
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWeights:
    """One version of a policy.

    Attributes:
        base: gives (Hugging Face name, tensor) of all parameters of the base, for an engine that has not got it yet.
        base_digest: manifest digest of the base: an engine that has it needs no tensors of it.
        factors: A, [rank, in], and B, [out, rank], of each adapted layer, by peft's names.
        scale: of the products.
    """

    base: Callable[[], Iterable[tuple[str, torch.Tensor]]]
    base_digest: str
    factors: Mapping[str, torch.Tensor]
    scale: float


WeightSet: TypeAlias = "Iterable[tuple[str, torch.Tensor]] | AdapterWeights"
"""(Hugging Face name, tensor) of all parameters, or an adapter with its base."""
