"""The summary of an evaluation: metrics by source, and everything that is in none of them."""

from __future__ import annotations

import json

import pytest

from rollmesh.evaluation.summary import summarize_records
from rollmesh.evaluation.tables import summary_lines
from tests.rollmesh.evaluation.records import record


def test_a_summary_counts_what_is_scored_and_what_is_not() -> None:
    records = [
        record(0, [1.0, 0.0]),
        record(1, [0.0, None], "b"),
        record(2, [None, None], "b"),
        {"row": 3, "refused": "long_prompt", "prompt_tokens": 99, "responses": []},
    ]
    records[0]["responses"][1]["finish"] = "length"
    found = summarize_records(records, name="m", folder="f", asked=6, n=2, right_at=1.0)
    assert found.prompts == {"asked": 6, "answered": 3, "left_out": 1, "without_score": 3}
    assert (found.scored, found.unscored, found.complete) == (3, 7, False)
    assert found.reasons == {"timeout": 3, "no response": 4}
    assert {name: estimate.value for name, estimate in found.metrics.items()} == {
        "mean@2": 0.25,
        "maj@2": 0.25,
        "best@2": 0.5,
        "pass@1": 0.25,
        "pass@2": 1.0,
    }
    assert found.by_source["a"]["mean@2"].value == 0.5
    assert found.by_source["b"]["mean@2"].value == 0.0
    assert (found.response_tokens, found.truncated) == (4.0, pytest.approx(1 / 6))
    assert json.loads(json.dumps(found.to_json()))["metrics"]["pass@2"] == {
        "value": 1.0,
        "prompts": 1,
        "low": None,
        "high": None,
    }
    text = "\n".join(summary_lines(found))
    for said in ("timeout (3), no response (4)", "left out, empty or too long: 1", "asks them again", "16.7% ended"):
        assert said in text


def test_a_summary_of_nothing_has_no_metrics() -> None:
    found = summarize_records([], name="m", folder="f", asked=2, n=1, right_at=1.0)
    assert (found.metrics, found.by_source, found.response_tokens, found.truncated) == ({}, {}, None, None)
    assert list(summary_lines(found))


def test_the_majority_is_that_of_the_answers_that_are_stored() -> None:
    spelled = record(0, [1.0, 1.0, 0.0, 0.0, 0.0])
    for response, text, answer in zip(
        spelled["responses"], ["0.5", "1/2", "A", "B", "so"], ["1/2", "1/2", "A", "B", ""], strict=True
    ):
        response["text"], response["answer"] = text, answer
    found = summarize_records([spelled], name="m", folder="f", asked=1, n=5, right_at=1.0)
    assert found.metrics["maj@5"].value == 1.0
    for response in spelled["responses"]:
        del response["answer"]
    found = summarize_records([spelled], name="m", folder="f", asked=1, n=5, right_at=1.0)
    assert found.metrics["maj@5"].value == pytest.approx(0.4), "the texts alone do not tell"
