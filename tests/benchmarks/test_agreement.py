"""Pairs of the agreement table are drawn from a seed, and reasons are given for kinds that exist."""

from __future__ import annotations

from benchmarks.rewards.agreement import COMPARED, markdown
from benchmarks.rewards.agreement_explanations import EXPLANATIONS
from benchmarks.rewards.agreement_pairs import pairs


def test_a_seed_draws_the_same_pairs_with_each_kind_as_often() -> None:
    for family in {family for *_, family in COMPARED}:
        drawn = pairs(family, 3, 7)
        assert drawn == pairs(family, 3, 7)
        assert drawn != pairs(family, 3, 8)
        kinds = [pair.kind for pair in drawn]
        assert {kinds.count(kind) for kind in kinds} == {3}


def test_reasons_are_about_kinds_that_are_compared() -> None:
    known = {(scorer, grader, pair.kind) for scorer, grader, family in COMPARED for pair in pairs(family, 1, 0)}
    assert EXPLANATIONS.keys() <= known


def test_the_tables() -> None:
    difference = {"kind": "money", "ours": "1", "theirs": "0", "reason": "why"}
    counts = {"scorer": "a", "grader": "b", "version": "c 1", "pairs": 1200, "agree": 1100}
    text = markdown([{**counts, "differences": [difference]}])
    assert "| `a` | b | c 1 | 1,200 | 1,100 |\n" in text
    assert "| `a` | b | money | 1 | 0 | why |\n" in text
