"""`rollmesh data check`: everything that a run would skip, or end by, is found before."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from rollmesh.data.check import DataReport, check_data
from rollmesh.data.check_report import histogram, lines, quantile, to_json
from rollmesh.data.prompt_keys import exact_key, normalized_key
from rollmesh.mesh.config import load_config
from rollmesh.mesh.errors import DataError
from tests.command import in_this_process
from tests.learner.data.conftest import record, tokenizer, write_jsonl  # noqa: F401 - fixture


@pytest.fixture
def config(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:  # noqa: F811 - fixture
    tokenizer.save_pretrained(tmp_path / "model")
    write_jsonl(tmp_path / "train.jsonl", [record(i) for i in range(20)])
    return {
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": str(tmp_path / "train.jsonl")},
        "rollout": {"max_prompt_tokens": 16},
    }


def check(config: dict[str, Any], *rows: dict[str, Any], held_out: list[dict[str, Any]] | None = None) -> DataReport:
    train = Path(config["data"]["train"])
    if rows:
        write_jsonl(train, list(rows))
    if held_out is not None:
        config["data"]["eval"] = str(write_jsonl(train.with_name("eval.jsonl"), held_out))
    return check_data(load_config(config), examples=2)


def found(report: DataReport) -> list[tuple[str, bool, int, list[str]]]:
    """(what, fails, count, numbers of the rows that are named) of each finding but notes: all prompts are texts."""
    return [
        (one.what, one.fails, one.count, [example.split(", ")[-1] for example in one.examples])
        for source in report.sources
        for one in source.findings.values()
        if not one.note
    ]


def test_data_without_a_fault(config: dict[str, Any]) -> None:
    report = check(config)
    [source] = report.sources
    assert (source.rows, source.data_sources, source.lengths) == (20, {"addition": 20}, {4: 10, 5: 10})
    assert found(report) == []
    assert list(lines(report))[-1] == "errors: 0, warnings: 0, notes: 1"


def test_prompts_that_are_texts_beside_a_chat_template_are_noted(config: dict[str, Any], tmp_path: Path) -> None:
    chat = record(1, prompt=[{"role": "user", "content": "1 + 1 ="}])
    report = check(config, record(0), chat, held_out=[record(3)])
    assert [(note.count, note.examples[0].split(", ")[-1]) for note in report.notes] == [(1, "row 0"), (1, "row 0")]
    assert report.notes[0].what.startswith("the prompt is a text, and the model's chat template is not used")
    assert any(line.startswith("  note: 1 x the prompt is a text") for line in lines(report))
    # As the note says.
    assert check(config, chat, held_out=[chat]).notes == []
    # A program writes its conversation itself, and some models have no template.
    agent = {"program": "agent.py:run"}
    assert check({**config, "rollout": {"max_prompt_tokens": 16, "agent": agent}}, record(0)).notes == []
    tokenizer_config = tmp_path / "model" / "tokenizer_config.json"
    for template in tmp_path.glob("model/*.jinja"):
        template.unlink()
    settings = json.loads(tokenizer_config.read_text())
    settings.pop("chat_template", None)
    tokenizer_config.write_text(json.dumps(settings))
    report = check(config, record(0), held_out=[record(1)])
    assert (report.notes, list(lines(report))[-1]) == ([], "nothing is wrong")


@pytest.mark.parametrize("refuse", [False, True])
def test_prompts_that_are_skipped_are_counted_and_named(config: dict[str, Any], refuse: bool) -> None:
    if refuse:
        config["data"]["on_long_prompt"] = "refuse"
    report = check(config, record(0), record(1, prompt="1" * 17), record(2, prompt=""), record(3, prompt="2" * 30))
    assert found(report) == [
        ("the prompt is over rollout.max_prompt_tokens (16)", refuse, 2, ["row 1: 17 tokens", "row 3: 30 tokens"]),
        ("the prompt is empty", refuse, 1, ["row 2"]),
    ]
    assert report.sources[0].lengths == {4: 1, 17: 1, 30: 1}, "all lengths are told, so that the limit can be chosen"


def test_the_same_prompt_is_found_however_it_is_written(config: dict[str, Any]) -> None:
    rows = [
        record(0),
        record(1),
        record(0),
        record(0, prompt="0 + 1 =."),
        record(0, reward_model={"ground_truth": "7"}),
    ]
    assert found(check(config, *rows)) == [
        ("the prompt is there twice", False, 1, ["row 0"]),
        ("the prompt is there twice, written otherwise", False, 1, ["row 0"]),
        ("the prompt is there twice, with other ground truths", False, 1, ["row 0"]),
    ]


def test_held_out_prompts_that_are_there_twice_are_compared_with_held_out_ones(config: dict[str, Any]) -> None:
    """Whatever is trained on besides."""
    report = check(config, held_out=[record(3), record(3), record(3, prompt="3+1 =")])
    assert found(report) == [
        ("the prompt is held out, and trained on", False, 3, ["row 3", "row 3"]),
        ("the prompt is there twice", False, 1, ["row 0"]),
        ("the prompt is there twice, written otherwise", False, 1, ["row 0"]),
    ]


def test_held_out_prompts_that_are_trained_on_are_found(config: dict[str, Any]) -> None:
    report = check(config, held_out=[record(3), record(30)])
    [(what, fails, count, _)] = found(report)
    assert (what, fails, count) == ("the prompt is held out, and trained on", False, 1)
    train = config["data"]["train"]
    assert report.warnings[0].examples == [f"{Path(train).with_name('eval.jsonl')}, row 0 is {train}, row 3"]


def test_sources_that_no_function_scores_are_found(config: dict[str, Any]) -> None:
    rows = [record(0, data_source="riddles"), record(1)]
    [(what, fails, count, where)] = found(check(config, *rows))
    assert what.startswith("no reward function scores data_source 'riddles'")
    assert (fails, count, where) == (True, 1, ["row 0"])
    for reward in ({"functions": ["exact_match"]}, {"by_data_source": {"riddles": ["exact_match"]}}):
        assert found(check({**config, "reward": reward})) == []


def test_rows_that_their_scorer_cannot_use_are_named_with_the_reason(config: dict[str, Any]) -> None:
    def truth(number: int, value: Any) -> dict[str, Any]:
        return record(number, reward_model={"ground_truth": value})

    report = check(config, record(0), truth(1, ["1", "2"]), truth(2, {"answer": "2"}))
    [finding] = report.warnings
    assert (finding.what, finding.count) == ("the row is unscorable by auto, and counts for nothing there", 2)
    assert "row 1: the ground truth is a list of 2, and one answer is meant" in finding.examples[0]
    assert report.errors == []
    # Another scorer means the list, and a function of the user's anything.
    for functions in (["exact_match"], ["mine.py:score"]):
        used = check({**config, "reward": {"functions": functions}}, record(0), truth(1, ["1", "2"]))
        assert found(used) == []
    # One of two scorers is enough.
    both = {**config, "reward": {"functions": ["exact_match", "arithmetic"]}}
    assert [one[:2] for one in found(check(both, truth(1, ["1", "2"])))] == [
        ("the row is unscorable by arithmetic, and counts for nothing there", False)
    ]
    alone = {**config, "reward": {"functions": ["arithmetic"]}}
    assert check(alone, truth(1, "many")).errors[0].what == "no row of the source can be scored"


def test_what_would_end_a_run_is_a_finding_of_its_source(config: dict[str, Any], tmp_path: Path) -> None:
    bad = write_jsonl(tmp_path / "bad.jsonl", [record(0, reward_model=...)])
    long = write_jsonl(tmp_path / "long.jsonl", [record(0, prompt="1" * 17)])
    pictures = write_jsonl(tmp_path / "p.jsonl", [record(0, prompt="<image>1", images=["absent.png"])])
    config["data"]["train"] = [str(bad), str(long), str(pictures), str(tmp_path / "absent.jsonl")]
    report = check_data(load_config(config), examples=2)
    assert [error.what.partition(":")[0] for error in report.errors] == [
        "the row cannot be used",
        "no prompt of the source can be used",
        "no prompt of the source can be used",
        "the prompt cannot be made",
        "no prompt of the source can be used",
        "the source cannot be used",
    ]
    assert "row 0: field `reward_model`" in report.errors[0].examples[0]


def test_all_rows_of_another_form_are_found_and_the_others_read(config: dict[str, Any], tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [record(i) for i in range(300)]
    rows[3], rows[270] = record(3, reward_model=...), record(270, reward_model=...)
    rows[299] = record(299, prompt=7)
    write_jsonl(tmp_path / "a.jsonl", rows)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write("not JSON\n")
    pq.write_table(pa.Table.from_pylist([record(1), record(2, data_source=None)]), tmp_path / "b.parquet")
    config["data"]["train"] = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.parquet")]
    lines_and_table = check_data(load_config(config), examples=2).sources
    assert [(source.rows, sum(source.data_sources.values())) for source in lines_and_table] == [(301, 297), (2, 1)]
    malformed, others = (
        finding for finding in lines_and_table[0].findings.values() if finding.what.startswith("the row cannot be used")
    )
    assert malformed.what.startswith("the row cannot be used: rows need `prompt`")
    assert [example.split(", ")[-1] for example in malformed.examples] == [
        f"row {row}: field `reward_model` is missing" for row in (3, 270)
    ]
    assert others.what == "the row cannot be used", "the forms are not recited where a value is of another kind"
    assert "row 299: field `prompt` is int" in others.examples[0]
    assert "row 300: not valid JSON" in others.examples[1]
    assert "row 1: field `data_source` is missing" in lines_and_table[1].findings.popitem()[1].examples[0]


def test_the_command_exits_by_what_it_found(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rollmesh = in_this_process(monkeypatch, capsys)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    clean = rollmesh("data", "check", str(tmp_path / "c.yaml"))
    assert (clean.returncode, clean.stderr) == (0, "")
    assert "tokens of a prompt (at most 16): least 4, median 4, 95% 5" in clean.stdout
    short = rollmesh("data", "check", str(tmp_path / "c.yaml"), "--rollout.max_prompt_tokens=4", "--json")
    assert short.returncode == 0
    answer = json.loads(short.stdout)
    [warning] = (one for one in answer["sources"][0]["findings"] if not one["note"])
    assert (answer["warnings"], warning["count"]) == (1, 10)
    strict = rollmesh("data", "check", str(tmp_path / "c.yaml"), "--rollout.max_prompt_tokens=4", "--strict")
    assert strict.returncode == DataError.exit_code
    wrong = rollmesh("data", "check", str(tmp_path / "c.yaml"), "--data.train=absent.jsonl")
    assert wrong.returncode == DataError.exit_code
    assert "ERROR: 1 x the source cannot be used" in wrong.stdout


def test_the_command_prepares_what_a_run_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rollmesh = in_this_process(monkeypatch, capsys)
    raw = write_jsonl(tmp_path / "raw.jsonl", [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(9)])
    given = ["data", "prepare", "gsm8k", "--from", f"{{path: {raw}, rows: 9}}", "--out", str(tmp_path / "out")]
    made = rollmesh(*given, "--hold-out", "2")
    assert made.returncode == 0
    assert f"{tmp_path / 'out' / 'train.parquet'}: 7 rows" in made.stdout
    assert f"--data.eval={tmp_path / 'out' / 'eval.parquet'}" in made.stdout
    assert rollmesh(*given, "--hold-out", "2", "--eval-from", str(raw)).returncode == 2
    assert rollmesh("data", "prepare", "gsm8k", "--from", "{pth: x}", "--out", "o").returncode == 2


# ------------------------------------------------------------------------------------------ pure parts


@given(values=st.lists(st.integers(1, 500), min_size=1), share=st.floats(0, 1))
def test_quantiles_are_values_that_are_there(values: list[int], share: float) -> None:
    value = quantile(Counter(values), share)
    assert value in values
    assert sum(one <= value for one in values) >= share * len(values) - 1e-9
    assert quantile(Counter(values), 0.0) == min(values)
    assert quantile(Counter(values), 1.0) == max(values)


@given(values=st.lists(st.integers(1, 5000), min_size=1))
def test_a_histogram_holds_every_value_once(values: list[int]) -> None:
    buckets = histogram(Counter(values))
    assert sum(count for _, count in buckets) == len(values)
    below = 0
    for bound, count in buckets:
        assert count == sum(below < value <= bound for value in values)
        below = bound


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("What is 2 + 2?", "what is  2+2", True),
        ("x - 1", "x + 1", False),
        ("Is it 12 or 1 2?", "Is it 12 or 12?", True),
        ("a", [{"role": "user", "content": "A."}], True),
        ("ﬁve", "five", True),
    ],
)
def test_prompts_are_the_same_whatever_their_spacing(one: Any, other: Any, same: bool) -> None:
    assert (normalized_key(one) == normalized_key(other)) == same
    assert exact_key(one) != exact_key(other)
    assert normalized_key(one, [b"1"]) != normalized_key(one, [b"2"])


def test_the_report_is_json(config: dict[str, Any]) -> None:
    report = to_json(check(config, record(0), record(0)))
    assert json.loads(json.dumps(report)) == report


def test_row_groups_too_large_to_be_shuffled_are_found(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollmesh.learner.data.tables.HELD_BYTES", 1)
    pq.write_table(pa.Table.from_pylist([record(i) for i in range(20)]), tmp_path / "d.parquet", row_group_size=10)
    config["data"]["train"] = str(tmp_path / "d.parquet")
    [(what, fails, count, _)] = found(check_data(load_config(config), examples=1))
    assert what.startswith("only 1 row groups fit")
    assert (fails, count) == (False, 1)


def test_prompts_differ_by_their_calls() -> None:
    def prompt(city: str) -> list[dict[str, Any]]:
        call = {"type": "function", "function": {"name": "weather", "arguments": {"city": city}}}
        return [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "12"}]

    assert normalized_key(prompt("Paris")) == normalized_key(prompt("Paris"))
    assert normalized_key(prompt("Paris")) != normalized_key(prompt("Rome"))
