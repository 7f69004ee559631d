"""Base weights with their adapters merged in, as they leave a Megatron model: each process with what it has.

Invariant: nothing is exchanged. A process that has rows of a weight has these rows of B, and all of A. One that has
columns has these columns of A, and all of B.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from rollmesh.learner.engines.megatron.adapters.rules import is_adapter_parameter
from rollmesh.learner.engines.megatron.weight_rules import Pieces
from rollmesh.learner.engines.megatron.weights.weight_map import ParameterKey
from rollmesh.learner.engines.tensors.adapters import MergedParts
from rollmesh.learner.engines.tensors.boxes import Box
from rollmesh.learner.engines.tensors.divided_tensor import DividedTensor
from rollmesh.learner.model_files.adapter_names import A_END, B_END

_WEIGHT = ".weight"
_Factor = tuple[Tensor, Box]
"""A process's part of a matrix, and its place in the full one."""


def merged_tensors(
    base: Sequence[DividedTensor],
    process: int,
    parameters: Mapping[ParameterKey, Tensor],
    pieces: Mapping[ParameterKey, Pieces],
    scale: float,
) -> list[DividedTensor]:
    """The tensors of the base, those of adapted layers merged as they are read.

    Args:
        base: of the model.
        process: this one.
        parameters: of this process, those of adapters too.
        pieces: of these.
        scale: of the products.
    """
    factors: dict[str, _Factor] = {
        piece.hf_name: (parameters[key].detach(), piece.hf_box)
        for key, found in pieces.items()
        if is_adapter_parameter(key[1])
        for piece in found.pieces
    }
    return [_merged(tensor, process, factors, scale) for tensor in base]


def _merged(tensor: DividedTensor, process: int, factors: Mapping[str, _Factor], scale: float) -> DividedTensor:
    layer = tensor.name.removesuffix(_WEIGHT)
    if layer + A_END not in factors:
        return tensor
    (a, a_box), (b, b_box) = factors[layer + A_END], factors[layer + B_END]
    _, boxes = tensor.place(process)
    own = [(a[:, _within(columns, a_box[1])], b[_within(rows, b_box[0])]) for rows, columns in boxes]
    return replace(tensor, local=MergedParts(tensor.local, own, scale))


def _within(side: slice, outer: slice) -> slice:
    """A range of a full matrix, counted within the part that there is."""
    return slice(side.start - outer.start, side.stop - outer.start)
