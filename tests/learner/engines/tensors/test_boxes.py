"""Boxes of tensors."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.learner.engines.tensors.boxes import (
    box_shape,
    box_start,
    flattened,
    full_box,
    intersect,
    rectangles,
    shift,
)

SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@st.composite
def runs(draw):
    shape = draw(SHAPES)
    start, stop = sorted(draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))
    return shape, start, stop


@st.composite
def boxes(draw, shape):
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return tuple(slice(start, draw(st.integers(start + 1, size))) for start, size in zip(starts, shape, strict=True))


@st.composite
def boxed(draw, number=1):
    shape = draw(SHAPES)
    return shape, *(draw(boxes(shape)) for _ in range(number))


def numbered(shape):
    return torch.arange(prod(shape)).view(shape)


@given(runs())
def test_a_run_is_a_few_boxes_in_its_order_each_a_run_by_itself(run):
    shape, start, stop = run
    found = rectangles(shape, start, stop)
    assert len(found) <= max(2 * len(shape) - 1, 1)
    elements = [numbered(shape)[box].flatten() for box in found]
    assert all(map(len, elements))
    assert torch.cat([torch.arange(0), *elements]).tolist() == list(range(start, stop))


def test_whole_rows_are_one_box():
    assert rectangles((4, 3, 2), 6, 18) == [(slice(1, 3), slice(0, 3), slice(0, 2))]
    assert rectangles((1, 10), 3, 10) == [(slice(0, 1), slice(3, 10))]
    assert rectangles((), 0, 1) == [()]
    assert rectangles((0, 3), 0, 0) == []


@given(boxed(2))
def test_boxes_have_in_common_what_is_in_both(case):
    shape, a, b = case
    inside = [torch.zeros(shape, dtype=torch.bool) for _ in range(2)]
    for found, box in zip(inside, (a, b), strict=True):
        found[box] = True
    common = torch.zeros(shape, dtype=torch.bool)
    if (both := intersect(a, b)) is not None:
        assert prod(box_shape(both))
        common[both] = True
    assert torch.equal(common, inside[0] & inside[1])


@given(boxed())
def test_a_box_is_found_again_in_a_tensor_without_it(case):
    shape, box = case
    assert box_shape(full_box(shape)) == shape
    local = shift(box, [-start for start in box_start(box)])
    assert local == full_box(box_shape(box))
    assert shift(local, box_start(box)) == box


@given(boxed())
def test_a_box_of_fewer_dimensions_has_the_same_elements(case):
    shape, box = case
    flat_shape, flat_box = flattened(shape, box)
    assert 1 <= len(flat_shape) <= max(1, len(shape))
    assert numbered(shape)[box].flatten().tolist() == numbered(flat_shape)[flat_box].flatten().tolist()


def test_rows_become_a_range():
    assert flattened((6, 5, 4), (slice(2, 4), slice(0, 5), slice(0, 4))) == ((120,), (slice(40, 80),))
    assert flattened((6, 5, 4), (slice(2, 3), slice(1, 4), slice(0, 4))) == ((6, 20), (slice(2, 3), slice(4, 16)))
    assert flattened((), ()) == ((1,), (slice(0, 1),))
