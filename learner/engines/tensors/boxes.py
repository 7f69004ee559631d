"""Boxes: parts of a tensor, as ranges of its dimensions; pure arithmetic.

Processes hold tensors in boxes of the full ones, whatever the engine. So weights that leave, what is received, and what
is saved are all described by boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

Box: TypeAlias = tuple[slice, ...]
"""A part of a tensor, as an index: a slice for each dimension, with start and stop and without a step."""


def full_box(shape: Sequence[int]) -> Box:
    """The box that is all of a tensor."""
    return tuple(slice(0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """The shape of what is in a box."""
    return tuple(side.stop - side.start for side in box)


def box_start(box: Box) -> tuple[int, ...]:
    """The indices of a box's first element."""
    return tuple(side.start for side in box)


def shift(box: Box, by: Sequence[int]) -> Box:
    """A box that is moved by so many elements in each dimension."""
    return tuple(slice(side.start + step, side.stop + step) for side, step in zip(box, by, strict=True))


def intersect(a: Box, b: Box) -> Box | None:
    """The box that two boxes of a tensor have in common; None: they have no element in common."""
    sides = tuple(slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b, strict=True))
    return sides if all(side.start < side.stop for side in sides) else None


def rectangles(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """A run of a tensor's elements in row-major order, as boxes.

    Args:
        shape: of the tensor.
        start, stop: of the run, counted from the tensor's first element.

    Returns:
        At most `2 * len(shape) - 1` boxes, in the order of the run. Each is a run by itself.
    """
    if start >= stop:
        return []
    if not shape:
        return [()]
    row = prod(shape[1:])
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        return _in_row(shape, first, head, tail)
    boxes = []
    if head:
        boxes += _in_row(shape, first, head, row)
        first += 1
    if first < last:
        boxes.append((slice(first, last), *full_box(shape[1:])))
    return boxes + _in_row(shape, last, 0, tail)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    return [(slice(row, row + 1), *rest) for rest in rectangles(shape[1:], start, stop)]


def flattened(shape: Sequence[int], box: Box) -> tuple[tuple[int, ...], Box]:
    """The same box of the same tensor, with as few dimensions as row-major order allows, but at least one.

    A dimension that the box has whole becomes part of the one before it. So a box that is a run of elements often has
    one dimension left, such as some rows of a matrix.

    Args:
        shape: of the tensor.
        box: in it, not empty.

    Returns:
        The tensor's shape, and the box.
    """
    sizes, sides = [1], [slice(0, 1)]
    for size, side in zip(shape, box, strict=True):
        whole = side.start == 0 and side.stop == size
        if whole or sizes[-1] == 1:
            last = sides[-1]
            # The dimension before has one element, or all of this one is taken with each of its own.
            start, stop = (last.start * size, last.stop * size) if whole else (side.start, side.stop)
            sizes[-1], sides[-1] = sizes[-1] * size, slice(start, stop)
        else:
            sizes.append(size)
            sides.append(side)
    return tuple(sizes), tuple(sides)
