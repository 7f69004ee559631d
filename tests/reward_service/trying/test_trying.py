"""Responses of files, scored as a run would, and their summary."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.protos import reward_pb2
from rollmesh.reward_service.client.client import LocalScorer
from rollmesh.reward_service.samples import items_from_file, read_rows, sample_row
from rollmesh.reward_service.scoring.engine import ScoringEngine
from rollmesh.reward_service.trying.chosen import chosen_scorer
from rollmesh.reward_service.trying.summary import quantiles, summarize
from rollmesh.reward_service.trying.trial import try_rows
from rollmesh.reward_service.trying.tried import Tried


def row(**fields: Any) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": "4+2="}],
        "data_source": "sums",
        "reward_model": {"ground_truth": "6"},
        **fields,
    }


def sample(step: int, group: str, member: int, response: str, reward: float) -> dict[str, Any]:
    where = {"step": step, "group": group, "member": member}
    return {**where, "prompt": "4+2=", "response": response, "reward": reward, "ground_truth": "6", "data_source": "s"}


def written(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


async def tried_of(path: Path, limit: int | None = None, scorer: LocalScorer | None = None) -> list[Tried]:
    scorer = scorer or LocalScorer(ScoringEngine(["exact_match"]))
    try:
        return [one async for one in try_rows(scorer, read_rows(path), limit=limit)]
    finally:
        await scorer.close()


# ---------------------------------------------------------------------------------------------- rows


def test_rows_of_both_files_and_forms_are_read(tmp_path: Path) -> None:
    records = [row(responses=["6", "7"], reward=[1.0, 0.0]), row(responses=["8"], reward=[0.0])]
    lines = list(read_rows(written(tmp_path / "rows.jsonl", *records)))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "rows.parquet")
    assert lines == list(read_rows(tmp_path / "rows.parquet"))
    assert (lines[0].prompt, lines[0].responses, lines[0].recorded) == ("4+2=", ("6", "7"), (1.0, 0.0))
    (kept,) = read_rows(written(tmp_path / "samples.jsonl", sample(3, "1.2", 5, "6", 1.0)))
    assert (kept.name, kept.step, kept.members, kept.recorded) == ("step 3, group 1.2", 3, ("5",), (1.0,))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "p"}, "row 0: no field 'ground_truth'"),
        (row(reward_model={}), "no field 'ground_truth'"),
        (row(responses=["a"], reward=[1.0, 2.0]), "2 rewards for 1 responses"),
        (row(response="a", reward="high"), "could not convert"),
        ([1], "it is no object"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, record: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(read_rows(written(tmp_path / "rows.jsonl", record)))


@pytest.mark.parametrize("content", ["{", "[" * 100_000, "\xff"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match="sample file"):
        list(read_rows(path))


def test_a_check_of_a_server_takes_the_first_response_or_the_truth(tmp_path: Path) -> None:
    items = items_from_file(written(tmp_path / "rows.jsonl", row(response="six"), row()))
    assert [item.response for item in items] == ["six", "certainly not this", "6", "certainly not this"]
    assert len({item.item_id for item in items}) == 4


# ---------------------------------------------------------------------------------------------- trials


async def test_each_response_is_scored_in_order_with_its_group(tmp_path: Path) -> None:
    calls: list[list[str]] = []

    def group_size(prompts: Any, completions: list[str], **_: Any) -> list[float]:
        calls.append(completions)
        return [float(len(completions))] * len(completions)

    path = written(
        tmp_path / "rows.jsonl",
        *(sample(1, "a", member, str(member), 2.0) for member in range(2)),
        sample(1, "b", 0, "x", 2.0),
        # A run that was continued has kept it again.
        sample(1, "b", 0, "x", 2.0),
        sample(2, "c", 0, "y", 9.0),
    )
    found = await tried_of(path, scorer=LocalScorer(ScoringEngine([group_size])))
    assert sorted(map(sorted, calls)) == [["0", "1"], ["x", "x"], ["y"]]
    assert [(one.name[-1], one.member, one.total) for one in found] == [
        *(("a", "0", 2.0), ("a", "1", 2.0)),
        *(("b", "0", 2.0), ("b", "0", 2.0), ("c", "0", 1.0)),
    ]
    assert [one.differs for one in found] == [False] * 4 + [True]


async def test_a_limit_cuts_groups_and_rows_without_responses_are_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", row(), row(responses=["6", "7", "6"]), row(response="6"))
    assert [one.total for one in await tried_of(path)] == [1.0, 0.0, 1.0, 1.0]
    assert [one.total for one in await tried_of(path, limit=2)] == [1.0, 0.0]


async def test_failures_are_outcomes(tmp_path: Path) -> None:
    def fail(solution_str: str, ground_truth: Any) -> float:
        raise ValueError("no such answer")

    (one,) = await tried_of(
        written(tmp_path / "rows.jsonl", row(response="6", reward=1.0)), scorer=LocalScorer(ScoringEngine([fail]))
    )
    assert (one.outcome, one.code, one.differs) == ("error", "exception", True)
    assert "no such answer" in one.line()
    assert "recorded 1" in one.line()
    assert one.to_json()["total"] is None


async def test_a_row_that_is_broken_ends_the_trial_after_those_before(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", *[row(response="6")] * 40, {"prompt": "p"})
    found = []
    scorer = LocalScorer(ScoringEngine(["exact_match"]))
    with pytest.raises(DataError, match="row 40"):
        async for one in try_rows(scorer, read_rows(path)):
            found.append(one)  # noqa: PERF401 - those before an error stay
    await scorer.close()
    assert found


async def test_a_scorer_is_chosen(scripted: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        chosen_scorer(functions=["math"], endpoint="grpc://127.0.0.1:1")
    server = await scripted()
    path = written(tmp_path / "rows.jsonl", row(response="5"))
    for scorer, total in (
        (chosen_scorer(endpoint=f"grpc://{server.address}"), 1.0),
        (chosen_scorer(functions=["exact_match"]), 0.0),
    ):
        await scorer.start()
        (one,) = [one async for one in try_rows(scorer, read_rows(path))]
        assert one.total == total
        await scorer.close()


# ---------------------------------------------------------------------------------------------- summary


def test_a_summary_of_all_outcomes() -> None:
    found = [Tried("a", str(n), "scored", 0.5, n / 10, recorded=n / 10 + (n == 9)) for n in range(10)]
    found += [
        Tried("b", "0", "error", 2.0, code="timeout", recorded=1.0),
        Tried("c", "0", "unscorable", 0.1, cost=0.25),
    ]
    summary = summarize(found, 4.0)
    assert summary.outcomes == {"scored": 10, "error timeout": 1, "unscorable": 1}
    assert (summary.mean, summary.per_s, summary.recorded) == (pytest.approx(0.45), 3.0, 11)
    assert summary.cost == 0.25
    # An error has no reward: it differs most.
    assert [(one.name, one.member) for one in summary.differing] == [("b", "0"), ("a", "9")]
    assert [one.name for one in summary.slowest] == ["b", "a", "c"]
    assert not summary.clean
    text = "\n".join(summary.lines())
    assert "2 of 11 recorded rewards are others now" in text
    assert "b/0: recorded 1, now error timeout" in text
    assert json.loads(json.dumps(summary.to_json()))["differing"][0] == ["b", "0", 1.0, "error timeout"]


def test_a_reason_is_counted_and_what_is_pending_explained() -> None:
    promised = [Tried("a", str(n), "error", 0.1, code="pending", text="ticket") for n in range(3)]
    text = "\n".join(summarize(promised, 1.0).lines())
    assert "3 x 'ticket'" in text
    assert "rollmesh reward deliver" in text
    assert "ticket" not in promised[0].line(explained=False)


def test_nothing_has_a_summary_too() -> None:
    summary = summarize([], 0.0)
    assert summary.clean
    assert list(summary.lines()) == ["0 responses: -"]
    assert quantiles([], [0.5]) == {}


def test_quantiles_are_interpolated() -> None:
    assert quantiles([0.0, 1.0], [0.0, 0.25, 0.5, 1.0]) == {0.0: 0.0, 0.25: 0.25, 0.5: 0.5, 1.0: 1.0}
    assert quantiles([3.0], [0.5]) == {0.5: 3.0}


def test_each_of_several_sources_has_a_row() -> None:
    found = [Tried("a", str(n), "scored", 0.1, n, data_source="sums") for n in (0.0, 1.0)]
    assert summarize(found, 1.0).sources == {}
    summary = summarize([*found, Tried("b", "0", "error", 0.1, code="timeout", data_source="code")], 1.0)
    text = "\n".join(summary.lines())
    assert "sums: 2 responses, scored 2, reward: mean 0.5" in text
    assert "code: 1 responses, scored 0, reward: mean -" in text
    assert summary.to_json()["sources"]["sums"] == {"responses": 2, "scored": 2, "mean": 0.5}


async def test_a_truth_that_cannot_be_used_is_told_with_its_remedy(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", row(response="3", reward_model={"ground_truth": ["33", "34"] * 9}))
    scorer = chosen_scorer(functions=["arithmetic"])
    await scorer.start()
    (one,) = [one async for one in try_rows(scorer, read_rows(path))]
    await scorer.close()
    assert one.verdict == "unscorable"
    assert "alternatives are read by exact_match, strings and qa" in one.line()
    assert one.to_json()["answer"] is None


def test_evidence_of_any_length_and_form_is_shown() -> None:
    result = reward_pb2.ScoreResult(item_id="a")
    result.scored.total = 1.0
    result.scored.evidence = "\x1b[2J" + "x" * 1000
    line = Tried.of(result, name="row 1", member="0", seconds=0.1).line()
    assert "\x1b" not in line
    assert len(line) < 300


def test_a_row_is_one_of_a_run_only_with_step_and_group() -> None:
    made = sample_row(row(response="6", step=3), "row 0")
    assert made.step is None


def test_components_are_shown_in_order() -> None:
    found = Tried("row 0", 0, "scored", 0.001, 1.0, {"b": 1.0, "a/x": 2.0, "a": 3.0})
    assert "(a 3, a/x 2, b 1)" in found.line()


@pytest.mark.parametrize(
    ("function", "words"), [("judge", "reward.judge.base_url"), ("process", "reward.process.model")]
)
def test_a_scorer_that_lacks_its_settings_is_named(function: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        chosen_scorer(functions=[function])
