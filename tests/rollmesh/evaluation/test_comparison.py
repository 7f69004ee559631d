"""Paired comparisons of two models against their definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.evaluation.compared import Comparison
from rollmesh.evaluation.comparison import ALL, compare, other_settings
from rollmesh.evaluation.tables import all_lines
from rollmesh.mesh.errors import DataError
from tests.rollmesh.evaluation.records import measured, record

_REWARDS = st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=3)
_PROMPTS = st.lists(st.tuples(_REWARDS, _REWARDS, st.sampled_from("ab")), min_size=1, max_size=12)


@given(_PROMPTS)
def test_differences_are_paired_by_prompt(prompts: list[tuple[list[float], list[float], str]]) -> None:
    before = measured("old", [record(row, one, source) for row, (one, _, source) in enumerate(prompts)], 3)
    # Rows that only one has answered do not count, in whatever order they came.
    after_records = [record(row, two, source) for row, (_, two, source) in enumerate(prompts)]
    after = measured("new", [record(99, [1.0]), *reversed(after_records)], 3)
    found = {(paired.source, paired.metric): paired for paired in compare(before, after)}
    sources = {source for _, _, source in prompts}
    assert {source for source, _ in found} == ({ALL} | (sources if len(sources) > 1 else set()))
    for source, metric in found:
        if metric != "mean":
            continue
        some = [(sum(one) / len(one), sum(two) / len(two)) for one, two, of in prompts if source in (ALL, of)]
        paired = found[source, metric]
        assert paired.baseline == pytest.approx(sum(one for one, _ in some) / len(some))
        assert paired.difference.value == pytest.approx(paired.other - paired.baseline)
        assert paired.wins == sum(two > one for one, two in some)
        assert paired.losses == sum(two < one for one, two in some)
        assert paired.wins + paired.losses + paired.ties == len(some) == paired.difference.prompts


def test_a_verdict_needs_an_interval_without_zero() -> None:
    ours = measured("old", [record(row, [float(row % 4 == 0)]) for row in range(80)])
    better = measured("new", [record(row, [float(row % 4 < 2)]) for row in range(80)])
    noise = measured("noise", [record(row, [float(row % 4 == 1 if row else 0)]) for row in range(80)])
    verdicts = [compare(ours, other)[0].verdict for other in (better, noise, ours)]
    assert verdicts == ["better", "not decided", "the same"]
    assert compare(better, ours)[0].verdict == "worse"
    text = "\n".join(all_lines(Comparison([ours, better], [compare(ours, better)], [])))
    assert "new against old" in text
    assert "20/0/60" in text


@pytest.mark.parametrize(
    ("prompts", "verdict"), [(1, "not decided"), (5, "not decided"), (6, "better"), (500, "better")]
)
def test_prompts_that_all_differ_by_the_same_decide_where_they_are_enough(prompts: int, verdict: str) -> None:
    ours = measured("old", [record(row, [0.0]) for row in range(prompts)])
    theirs = measured("new", [record(row, [1.0]) for row in range(prompts)])
    assert compare(ours, theirs)[0].verdict == verdict
    assert compare(theirs, ours)[0].verdict == verdict.replace("better", "worse")
    # As few of them decide as little with values of their own.
    spread = measured("new", [record(row, [1.0 + row]) for row in range(prompts)])
    assert compare(ours, spread)[0].verdict == verdict


def test_responses_without_a_score_count_for_nothing() -> None:
    ours = measured("old", [record(0, [1.0, None]), record(1, [None, None]), record(2, [0.0, 0.0])], 2)
    theirs = measured("new", [record(0, [1.0, 1.0]), record(1, [1.0, 1.0]), record(2, [1.0, 0.0])], 2)
    mean, *others = compare(ours, theirs)
    assert (mean.difference.prompts, mean.baseline, mean.other) == (2, 0.5, 0.75)
    assert {paired.metric: paired.difference.prompts for paired in others} == {
        "maj@2": 2,
        "best@2": 2,
        "pass@1": 2,
        "pass@2": 1,
    }


def test_other_data_and_rewards_are_refused_by_name_and_other_sampling_is_told() -> None:
    ours = measured("old", [record(0, [1.0])])
    with pytest.raises(DataError, match=r"differ in data\.eval \(old\.jsonl, new\.jsonl\)"):
        compare(ours, measured("new", [record(0, [1.0])], 1, {"data.eval": "beef"}))
    with pytest.raises(DataError, match=r"reward\.functions \(\['math'\], \['qa'\]\)"):
        compare(ours, measured("new", [record(0, [1.0])], 1, {"reward.functions": ["qa"]}))
    with pytest.raises(DataError, match="have no prompt in common"):
        compare(ours, measured("new", [record(1, [1.0])]))
    sampled = measured("new", [record(0, [1.0, 0.0])], 2, {"eval.temperature": 1.0, "eval.rows": 7})
    assert other_settings(ours, sampled) == ["eval.n 1 -> 2", "eval.temperature 0.0 -> 1.0"]
    assert [paired.metric for paired in compare(ours, sampled)] == ["mean", "pass@1"]
