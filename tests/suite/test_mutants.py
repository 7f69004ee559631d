"""Changes of the product that tests must notice."""

from __future__ import annotations

import ast

import pytest

from tests.repository import REPOSITORY
from tests.suite.mutants import mutant_at, places_in, sample


@pytest.mark.parametrize(
    ("source", "change"),
    [
        ("a < b", "Lt -> LtE"),
        ("a + b", "Add -> Sub"),
        ("a and b", "and <-> or"),
        ("x = True", "True <-> False"),
        ("x = 3", "constant + 1"),
        ("f(a)", "call left out"),
        ("x = a if b else c", "condition negated"),
    ],
)
def test_each_kind_of_change_is_found(source: str, change: str) -> None:
    assert [found for _, found in places_in(ast.parse(source))] == [change]


def test_texts_are_left_alone() -> None:
    assert places_in(ast.parse("x = 'a' + b\n'''a docstring'''")) == []


def test_a_mutant_differs_in_one_place_and_is_drawn_again_by_its_seed() -> None:
    first, again = (sample(4, 7, ["buffer", "mesh"]) for _ in range(2))
    assert first == again
    for mutant in first:
        path = REPOSITORY / mutant.path
        assert mutant.source != ast.unparse(ast.parse(path.read_text()))
        assert mutant_at(path, *places_in(ast.parse(path.read_text()))[0]).path == mutant.path
