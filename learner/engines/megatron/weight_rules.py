"""The rules by which Hugging Face tensors become Megatron's, and their geometry.

A Megatron tensor of one process is a set of pieces. Each piece is a box of a full tensor under its Hugging Face name.
Start, export, push and checkpoints all follow from these boxes. Megatron-Core is not needed for them.

Invariant: the pieces of a local tensor do not overlap. They fill it, but for the padding rows of a vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from torch import Tensor

from rollmesh.learner.engines.megatron.parallel import ParallelPlace, ParallelSizes
from rollmesh.learner.engines.tensors.boxes import Box, box_shape, full_box
from rollmesh.mesh.errors import ConfigError

EXPERT = "{expert}"
"""The place of an expert's number in a Megatron name, counted within the process."""


class Form(Enum):
    """The ways in which sources lie in a Megatron tensor and are divided."""

    WHOLE = "each process of a tensor-parallel group has all of it"
    COLUMNS = "columns are divided"
    ROWS = "rows are divided"
    QKV = "group by group the rows of the queries, of the key and of the value; groups are divided"
    GATE_UP = "the gate's rows, then the other matrix's; the rows of each are divided"
    VOCABULARY = "rows are divided, after padding"
    EXPERT_GATE_UP = "as GATE_UP, of one expert, from the halves of one matrix"
    EXPERT_DOWN = "as COLUMNS, of one expert"

    @property
    def of_experts(self) -> bool:
        """Each Megatron tensor is one expert's part of a tensor that holds them all."""
        return self in (Form.EXPERT_GATE_UP, Form.EXPERT_DOWN)


@dataclass(frozen=True, slots=True)
class Rule:
    """The way from Hugging Face tensors to a Megatron tensor.

    Attributes:
        names: names that Megatron gives the tensor, one for each kind of layer that its users may choose.
        sources: Hugging Face names, in the order in which they lie in the tensor.
        form: the way they lie there.
        place: `layer`: both kinds of names stand for what follows a layer's prefix. Else the part of the model, of all
            parts, that has the tensor.
    """

    names: tuple[str, ...]
    sources: tuple[str, ...]
    form: Form = Form.WHOLE
    place: Literal["layer", "first", "last"] = "layer"

    def matches(self, name: str) -> bool:
        """The rule makes the tensor of this Megatron name."""
        return any(_pattern(own).fullmatch(name) for own in self.names)

    def expert_of(self, name: str) -> int:
        """The number of the expert, within the process, in a name that matches; 0 where the tensor has no expert."""
        found = next(found for own in self.names if (found := _pattern(own).fullmatch(name)))
        return int(found.groupdict().get("expert") or 0)

    def names_of(self, expert: int) -> tuple[str, ...]:
        """The names for an expert of the process."""
        return tuple(name.replace(EXPERT, str(expert)) for name in self.names)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a local Megatron tensor.

    Attributes:
        hf_name: Hugging Face name of the full tensor.
        hf_box: in the full tensor.
        local_box: in the local tensor; an expert's has one dimension less.
    """

    hf_name: str
    hf_box: Box
    local_box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the box in the full tensor."""
        return box_shape(self.hf_box)

    def view(self, local: Tensor) -> Tensor:
        """The piece's memory in a local tensor, in the shape of the box in the full one."""
        return local.detach()[self.local_box].view(self.shape)

    def rows(self, box: Box) -> Piece:
        """A part of the piece that has fewer rows.

        Args:
            box: in the full tensor; in its first dimension alone it may differ from the piece's.
        """
        if box[0] == self.hf_box[0]:
            return self
        first, *rest = self.local_box
        start = first.start + box[0].start - self.hf_box[0].start
        return Piece(self.hf_name, box, (slice(start, start + box[0].stop - box[0].start), *rest))


@dataclass(frozen=True, slots=True)
class Pieces:
    """A local Megatron tensor: its shape, and all of its pieces."""

    local_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def padded(self) -> bool:
        """Some of its rows are padding."""
        return sum(math.prod(piece.shape) for piece in self.pieces) < math.prod(self.local_shape)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shapes of a model.

    Attributes:
        shapes: of the full tensors, by Hugging Face name.
        groups: query groups, which are the heads of keys and values.
        padded_vocab: rows of a vocabulary with its padding.
    """

    shapes: Mapping[str, tuple[int, ...]]
    groups: int
    padded_vocab: int


@dataclass(frozen=True, slots=True)
class _Source:
    """A full tensor, and the division of those made from it.

    Attributes:
        name, shape: of the full tensor.
        key: name of the division's size.
        size, rank: of the division within a matrix.
        expert: number in the full tensor.
        geometry: of the model.
    """

    name: str
    shape: tuple[int, ...]
    key: str
    size: int
    rank: int
    expert: int
    geometry: Geometry

    def part(self, length: int, what: str) -> int:
        """The length of a process's part."""
        return even_part(length, self.size, self.key, what)


def pieces_of(
    rule: Rule, name: str, sizes: ParallelSizes, place: ParallelPlace, geometry: Geometry, prefix: str = ""
) -> Pieces:
    """The pieces of a local Megatron tensor.

    Args:
        rule: that matches the name.
        name: of Megatron, as in the rule.
        sizes, place: of the process.
        geometry: of the model.
        prefix: of the sources' names (a layer's).

    Raises:
        ConfigError: a size of the division does not divide the tensor.
    """
    key, size, rank, expert = "tp", sizes.tp, place.tp, 0
    if rule.form.of_experts:
        experts = geometry.shapes[prefix + rule.sources[0]][0]
        key, size, rank = "etp", sizes.etp, place.etp
        expert = even_part(experts, sizes.ep, "ep", "experts") * place.ep + rule.expert_of(name)
    sources = [
        _Source(prefix + source, geometry.shapes[prefix + source], key, size, rank, expert, geometry)
        for source in rule.sources
    ]
    return _GEOMETRIES[rule.form](sources)


def even_part(length: int, size: int, key: str, what: str) -> int:
    """A length's part where it is divided evenly.

    Raises:
        ConfigError: it cannot be.
    """
    if length % size:
        nearest = next(fewer for fewer in range(size, 0, -1) if length % fewer == 0)
        raise ConfigError(f"{key}: {size} does not divide {length} {what}", hint=f"{key}: {nearest} does")
    return length // size


def _whole(sources: Sequence[_Source]) -> Pieces:
    (source,) = sources
    box = full_box(source.shape)
    return Pieces(source.shape, (Piece(source.name, box, box),))


def _columns(sources: Sequence[_Source]) -> Pieces:
    (source,) = sources
    rows, columns = source.shape
    width = source.part(columns, f"columns of {source.name}")
    box = (slice(0, rows), _run(source.rank, width))
    return Pieces((rows, width), (Piece(source.name, box, full_box((rows, width))),))


def _rows(sources: Sequence[_Source]) -> Pieces:
    (source,) = sources
    rows, width = source.shape
    own = source.part(rows, f"rows of {source.name}")
    box = (_run(source.rank, own), slice(0, width))
    return Pieces((own, width), (Piece(source.name, box, full_box((own, width))),))


def _qkv(sources: Sequence[_Source]) -> Pieces:
    groups = sources[0].part(sources[0].geometry.groups, "query groups (num_key_value_heads)")
    pieces, row = [], 0
    for group in range(sources[0].rank * groups, (sources[0].rank + 1) * groups):
        for source in sources:
            total, *rest = source.shape
            rows = total // source.geometry.groups
            pieces.append(
                Piece(source.name, (_run(group, rows), *full_box(rest)), (slice(row, row + rows), *full_box(rest)))
            )
            row += rows
    return Pieces((row, *sources[0].shape[1:]), tuple(pieces))


def _gate_up(sources: Sequence[_Source]) -> Pieces:
    pieces = []
    for place, source in enumerate(sources):
        rows, *rest = source.shape
        own = source.part(rows, f"rows of {source.name}")
        columns = full_box(rest)
        pieces.append(Piece(source.name, (_run(source.rank, own), *columns), (_run(place, own), *columns)))
    return Pieces((len(sources) * own, *rest), tuple(pieces))


def _vocabulary(sources: Sequence[_Source]) -> Pieces:
    (source,) = sources
    rows, width = source.shape
    own = source.part(source.geometry.padded_vocab, "rows of the padded vocabulary")
    start = source.rank * own
    held = min(start + own, rows) - start
    if held <= 0:
        return Pieces((own, width), ())
    box = (slice(start, start + held), slice(0, width))
    return Pieces((own, width), (Piece(source.name, box, full_box((held, width))),))


def _expert_gate_up(sources: Sequence[_Source]) -> Pieces:
    (source,) = sources
    _, rows, width = source.shape
    expert, half = slice(source.expert, source.expert + 1), rows // 2
    own = source.part(half, f"rows of {source.name}")
    if own == half:
        # Both halves as one box: fewer are better, there is one for every expert.
        return Pieces((rows, width), (Piece(source.name, (expert, *full_box((rows, width))), full_box((rows, width))),))
    pieces = []
    for place in range(2):
        start = place * half + source.rank * own
        box = (expert, slice(start, start + own), slice(0, width))
        pieces.append(Piece(source.name, box, (_run(place, own), slice(0, width))))
    return Pieces((2 * own, width), tuple(pieces))


def _expert_down(sources: Sequence[_Source]) -> Pieces:
    (source,) = sources
    _, rows, columns = source.shape
    width = source.part(columns, f"columns of {source.name}")
    box = (slice(source.expert, source.expert + 1), slice(0, rows), _run(source.rank, width))
    return Pieces((rows, width), (Piece(source.name, box, full_box((rows, width))),))


_GEOMETRIES: Mapping[Form, Callable[[Sequence[_Source]], Pieces]] = {
    Form.WHOLE: _whole,
    Form.COLUMNS: _columns,
    Form.ROWS: _rows,
    Form.QKV: _qkv,
    Form.GATE_UP: _gate_up,
    Form.VOCABULARY: _vocabulary,
    Form.EXPERT_GATE_UP: _expert_gate_up,
    Form.EXPERT_DOWN: _expert_down,
}


def _run(number: int, length: int) -> slice:
    """The run of that number, of runs of one length."""
    return slice(number * length, (number + 1) * length)


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(re.escape(EXPERT), r"(?P<expert>\d+)"))
