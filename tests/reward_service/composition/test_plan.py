"""Composition as arithmetic: sums, weights, scales, gates, and parts without a score."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.mesh.errors import RewardError
from rollmesh.reward_service.composition.part import Part
from rollmesh.reward_service.composition.plan import SHUT, Composition, PartOutcome
from rollmesh.reward_service.outcomes import NOT_BEGUN, Failed, Outcome, Scored, SpanValue, Unscorable, not_begun

NUMBERS = st.floats(-1e6, 1e6, allow_nan=False)
INTERVALS = st.tuples(st.floats(-100, 100), st.floats(0.1, 100)).map(lambda pair: (pair[0], pair[0] + pair[1]))
LATER = Failed("judge_unavailable", "503", retryable=True)
BROKEN = Failed("exception", "a bug")
NO_TRUTH = Unscorable("no truth")


@st.composite
def parts(draw: Any) -> Part:
    on_error = draw(st.sampled_from(["fail", "skip", "value"]))
    return Part(
        draw(st.sampled_from(["qa", "math", "mine.py:f"])),
        weight=draw(NUMBERS),
        clip=draw(st.none() | INTERVALS),
        range=draw(st.none() | INTERVALS),
        on_error=on_error,
        value=draw(NUMBERS) if on_error == "value" else None,
        required=draw(st.booleans()),
    )


def composed(entries: list[Part | str], outcomes: list[PartOutcome], **normalize: Any) -> Outcome:
    return Composition(entries, **normalize).compose(outcomes)


def total(outcome: Outcome) -> float:
    assert isinstance(outcome, Scored)
    return outcome.total


@given(st.lists(st.tuples(parts(), NUMBERS), min_size=1, max_size=4))
def test_the_whole_is_the_sum_of_its_parts(scored: list[tuple[Part, float]]) -> None:
    whole = composed([part for part, _ in scored], [Scored(raw) for _, raw in scored])
    alone = [total(composed([part], [Scored(raw)])) for part, raw in scored]
    assert total(whole) == pytest.approx(math.fsum(alone), rel=1e-9, abs=1e-6)


@given(parts(), NUMBERS, st.floats(-100, 100))
def test_a_weight_multiplies_what_is_left_after_clip_and_range(part: Part, raw: float, factor: float) -> None:
    heavier = Part(**{**{name: getattr(part, name) for name in Part.__slots__}, "weight": part.weight * factor})
    expected = factor * total(composed([part], [Scored(raw)]))
    assert total(composed([heavier], [Scored(raw)])) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(INTERVALS, NUMBERS)
def test_scales_meet(interval: tuple[float, float], raw: float) -> None:
    low, high = interval
    for part, normalize in ((Part("a", range=interval), None), (Part("a"), interval)):
        values = [total(composed([part], [Scored(x)], normalize=normalize)) for x in (low, high, raw)]
        assert values == pytest.approx([0.0, 1.0, (raw - low) / (high - low)], abs=1e-6)
    assert 0.0 <= total(composed([Part("a", range=interval, clip=interval)], [Scored(raw)])) <= 1.0


@given(
    st.lists(
        st.tuples(parts(), st.sampled_from([Scored(1.0), NO_TRUTH, LATER, BROKEN, not_begun("busy")])),
        min_size=1,
        max_size=4,
    )
)
def test_each_outcome_has_its_effect_and_no_failure_becomes_a_number(drawn: list[tuple[Part, Outcome]]) -> None:
    outcome = composed([part for part, _ in drawn], [each for _, each in drawn])
    required = [each for part, each in drawn if part.required and isinstance(each, Unscorable)]
    final = [
        each for part, each in drawn if isinstance(each, Failed) and (part.on_error == "fail" or each.code == NOT_BEGUN)
    ]
    left = [
        part.worth(each.total if isinstance(each, Scored) else part.value or 0.0)
        for part, each in drawn
        if isinstance(each, Scored) or (isinstance(each, Failed) and part.on_error == "value")
    ]
    if required:
        assert isinstance(outcome, Unscorable)
    elif final:
        assert outcome in final
        assert outcome == BROKEN or BROKEN not in final
        assert outcome.code != NOT_BEGUN or {each.code for each in final} == {NOT_BEGUN}
    elif left:
        assert total(outcome) == pytest.approx(sum(left))
    elif any(isinstance(each, Failed) for _, each in drawn):
        assert isinstance(outcome, Failed)
    else:
        assert isinstance(outcome, Unscorable)


def test_raw_components_are_kept_with_what_was_decided() -> None:
    entries = [
        Part("math", weight=2.0),
        Part("mine.py:style", name="style", weight=0.1, gate="math above 0.5"),
        Part("judge.py:f", name="judge", on_error="skip"),
        Part("other.py:g", on_error="value", value=-1.0),
    ]
    right = composed(entries, [Scored(1.0, {"x": 3.0}), Scored(5.0, {"y": 4.0}), Scored(0.25), BROKEN])
    assert right == Scored(
        2.0 + 0.5 + 0.25 - 1.0,
        {"math": 1.0, "math/x": 3.0, "style": 5.0, "style/y": 4.0, "style/gate": 1.0, "judge": 0.25, "judge/error": 0.0}
        | {"g": -1.0, "g/error": 1.0},
        per_token=[],
        evidence="g: exception: a bug",
    )
    wrong = composed(entries, [Scored(0.0), SHUT, LATER, Scored(1.0)])
    assert isinstance(wrong, Scored)
    assert wrong.total == 1.0
    assert wrong.components == {
        "math": 0.0, "style": 0.0, "style/gate": 0.0, "judge/error": 1.0, "g": 1.0, "g/error": 0.0,
    }  # fmt: skip


def test_gates_open_above_their_threshold_and_for_values_that_stand_in() -> None:
    plan = Composition(["a", Part("b", gate="a"), Part("c", gate="a above -2"), Part("d", gate="c")])
    assert (plan.depths, plan.stages) == ([0, 1, 1, 2], 3)
    assert [plan.opens(1, Scored(raw)) for raw in (-1.0, 0.0, 0.1)] == [False, False, True]
    assert [plan.opens(2, Scored(raw)) for raw in (-2.0, -1.9)] == [False, True]
    assert not any(plan.opens(1, outcome) for outcome in (NO_TRUTH, BROKEN, SHUT))
    stand_in = Composition([Part("a", on_error="value", value=1.0), Part("b", gate="a")])
    assert stand_in.opens(1, BROKEN)


def test_tokens_and_spans_are_weighted_as_their_part_and_never_shifted() -> None:
    entries = [Part("a", weight=3.0, range=(-1.0, 1.0), clip=(0.0, 0.5)), Part("b", weight=-1.0)]
    both = composed(
        entries, [Scored(1.0, per_token=[1.0, 2.0]), Scored(1.0, per_token=[0.5, 0.0])], normalize=(0.0, 2.0)
    )
    assert isinstance(both, Scored)
    assert both.per_token == pytest.approx([0.5, 1.5])
    spans = composed(entries, [Scored(1.0, spans=[(0, 2, 1.0)]), Scored(1.0, spans=[(0, 2, 1.0), (2, 4, 2.0)])])
    assert isinstance(spans, Scored)
    assert list(spans.spans) == [SpanValue(0, 2, 0.5), SpanValue(2, 4, -2.0)]
    kinds = [SpanValue(0, 2, 1.0), SpanValue(0, 2, 1.0, turn=1), SpanValue(0, 2, 1.0, of_total=True)]
    apart = composed([Part("a", weight=2.0)], [Scored(1.0, spans=kinds)])
    assert isinstance(apart, Scored)
    assert list(apart.spans) == [span._replace(value=2.0) for span in kinds], "only equal parts are one"
    mixed = composed(entries, [Scored(1.0, spans=[(0, 2, 1.0)]), Scored(1.0, per_token=[0.5])])
    assert isinstance(mixed, Scored)
    assert (list(mixed.per_token), list(mixed.spans)) == ([-0.5], [SpanValue(0, 2, 1.5)])


def test_a_sum_that_is_no_number_fails() -> None:
    for outcome in (Scored(1e308), Scored(1.0, spans=[(0, 1, 1e308)])):
        failed = composed([Part("a", weight=1e10)], [outcome])
        assert isinstance(failed, Failed)
        assert failed.code == "nan"


def test_grounds_and_costs_of_all_parts_stay() -> None:
    one = Scored(1.0, evidence="so", cost=0.5, cached=True)
    both = composed(["a", "b"], [one, Scored(1.0, evidence="and so", cost=0.25)])
    assert isinstance(both, Scored)
    assert (both.evidence, both.cost, both.cached) == ("a: so\nb: and so", 0.75, False)
    failed = composed(["a", Part("b", on_error="skip")], [one, BROKEN])
    assert isinstance(failed, Scored)
    assert not failed.cached
    assert composed(["a"], [one]) == Scored(1.0, {"a": 1.0}, evidence="so", cost=0.5, cached=True)


def test_an_error_says_when_all_may_come_again() -> None:
    waits = [Failed("a", "", retryable=True, retry_after_s=s) for s in (1.0, 5.0, 2.0)]
    failed = composed(["a", "b", "c"], list(waits))
    assert isinstance(failed, Failed)
    assert failed.retry_after_s == 5.0


def test_lists_that_cannot_be_are_refused() -> None:
    with pytest.raises(RewardError, match="the gate of 'a' names no other part"):
        Composition([Part("a", gate="x")])
    assert composed([], []) == Failed("no_scorer", "no reward function is configured")


def test_the_first_part_that_reads_answers_says_what_the_answer_is() -> None:
    silent, read, other = Scored(1.0), Scored(0.0, answer="7"), Scored(1.0, answer="8")
    for entries, outcomes, answer in (
        (["math"], [read], "7"),
        (["mine.py:f", "math", "qa"], [silent, read, other], "7"),
        (["mine.py:f", "math"], [silent, NO_TRUTH], None),
        (["math", "qa"], [Scored(0.0, answer=""), other], ""),
    ):
        found = composed(entries, outcomes)
        assert isinstance(found, Scored)
        assert found.answer == answer
