"""A Megatron model's state in boxes of full tensors, under the names that every engine's checkpoints have.

The distributed optimizer gives each data-parallel rank a range of every parameter, flattened. Such a range is a few
boxes of the parameter, each of them a box of a full tensor. So a checkpoint can be read in any division, by any engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from rollmesh.learner.engines.megatron.training.optimizer import MOMENTS, OwnedRange
from rollmesh.learner.engines.megatron.weight_rules import Piece, Pieces
from rollmesh.learner.engines.tensors.box_state import BoxedTensor
from rollmesh.learner.engines.tensors.boxes import Box, box_shape, box_start, intersect, rectangles, shift
from rollmesh.learner.engines.tensors.state import MODEL_KEY, OPTIMIZER_KEY

STEP = "step"


@dataclass(frozen=True, slots=True)
class RangePart:
    """A part of a range that is a box of a full tensor.

    Attributes:
        name: Hugging Face name.
        box: in the full tensor.
        shape: of the box in the local tensor.
        strides: of the local tensor, in elements.
        offset: of the box's first element in the range.
    """

    name: str
    box: Box
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def view(self, values: Tensor) -> Tensor:
        """The part of a range's values, in the shape of the box.

        Args:
            values: [n], contiguous, those of the range.
        """
        part = values.detach().as_strided(self.shape, self.strides, values.storage_offset() + self.offset)
        return part if len(self.box) == len(self.shape) else part[None]


def parts_of(pieces: Pieces, start: int, stop: int) -> list[RangePart]:
    """The parts of a range of a local tensor, flattened; what pads a vocabulary is in none.

    Args:
        pieces: of the local tensor.
        start, stop: of the range.
    """
    strides = tuple(prod(pieces.local_shape[dimension + 1 :]) for dimension in range(len(pieces.local_shape)))
    parts = []
    for rectangle in rectangles(pieces.local_shape, start, stop):
        for piece in pieces.pieces:
            if (common := intersect(rectangle, piece.local_box)) is None:
                continue
            # An expert is one row of a tensor that has a dimension more.
            extra = len(piece.hf_box) - len(piece.local_box)
            moves = [
                full.start - local.start for full, local in zip(piece.hf_box[extra:], piece.local_box, strict=True)
            ]
            offset = sum(place * stride for place, stride in zip(box_start(common), strides, strict=True)) - start
            box = (*piece.hf_box[:extra], *shift(common, moves))
            parts.append(RangePart(piece.hf_name, box, box_shape(common), strides, offset))
    return parts


def boxed_state(
    owned: Iterable[tuple[OwnedRange, Pieces]], shapes: Mapping[str, tuple[int, ...]], steps: int
) -> dict[str, Any]:
    """The state of masters and optimizer, for `torch.distributed.checkpoint`.

    Args:
        owned: ranges of this process, with the pieces of their tensors.
        shapes: of all full tensors, by Hugging Face name, those of other processes too.
        steps: that the moments have seen.
    """
    found: dict[str, list[tuple[RangePart, OwnedRange]]] = {name: [] for name in shapes}
    for own, pieces in owned:
        for part in parts_of(pieces, own.start, own.stop):
            found[part.name].append((part, own))

    def boxed(name: str, of: str | None) -> BoxedTensor:
        parts = [(part.box, part.view(own.master if of is None else own.state[of])) for part, own in found[name]]
        return BoxedTensor(shapes[name], torch.float32, parts)

    moments = {
        name: {STEP: torch.tensor(float(steps)), **{moment: boxed(name, moment) for moment in MOMENTS}}
        for name in shapes
    }
    return {MODEL_KEY: {name: boxed(name, None) for name in shapes}, OPTIMIZER_KEY: {"state": moments}}


def read_steps(state: Mapping[str, Any]) -> int:
    """Steps that the moments of a state have seen, which has been read."""
    return int(next(iter(state[OPTIMIZER_KEY]["state"].values()))[STEP])


def fill_master(owned: OwnedRange, pieces: Pieces, piece: Piece, values: Tensor) -> None:
    """Gives a range's master what it has of a piece.

    Args:
        owned: the range.
        pieces: of its tensor.
        piece: of these, or some rows of one.
        values: in the shape of the piece's box.
    """
    for part in parts_of(pieces, owned.start, owned.stop):
        common = intersect(part.box, piece.hf_box) if part.name == piece.hf_name else None
        if common is not None:
            source = values[shift(common, [-side.start for side in piece.hf_box])]
            part.view(owned.master)[shift(common, [-side.start for side in part.box])].copy_(source)
