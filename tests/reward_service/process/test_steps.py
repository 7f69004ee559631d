"""Where steps end, and what their values come to."""

from __future__ import annotations

import pytest

from rollmesh.reward_service.outcomes import Span
from rollmesh.reward_service.process.steps import Splitting, split, total_of


@pytest.mark.parametrize(
    ("how", "response", "steps"),
    [
        ("blank_rows", "a\n\nb c\n \n\n d ", ["a", "b c", "d"]),
        ("blank_rows", "\n\n", []),
        ("rows", "a\n\n  b\nc", ["a", "b", "c"]),
        ("numbered", "So.\nStep 1: a\n**Step 2** c\n## step 9", ["So.", "Step 1: a", "**Step 2** c", "## step 9"]),
        ("numbered", "no steps, in step 3", ["no steps, in step 3"]),
        ("spans", "abc def", ["abc def"]),
        ("rows", "", []),
    ],
)  # fmt: skip
def test_steps_are_found(how: Splitting, response: str, steps: list[str]) -> None:
    assert [response[begin:end] for begin, end in split(response, how)] == steps


def test_the_spans_of_turns_and_steps_are_taken_and_those_of_tools_are_not() -> None:
    spans = [Span(4, 7, "turn"), Span(0, 3, "turn"), Span(3, 4, "tool"), Span(5, 99, "step")]
    assert split("abc def", "spans", spans) == [(0, 3), (4, 7), (5, 7)]


def test_totals() -> None:
    values = [0.5, 0.25, 1.0]
    assert [total_of(values, how) for how in ("min", "mean", "last", "product", "none")] == [
        0.25,
        pytest.approx(1.75 / 3),
        1.0,
        0.125,
        0.0,
    ]
