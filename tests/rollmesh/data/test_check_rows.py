"""`rollmesh data check --for`: everything that a trainer would leave out, or end by, is found before."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rollmesh.data.check import Finding
from rollmesh.data.check_report import lines, to_json
from rollmesh.data.check_rows import check_rows
from rollmesh.learner.data.parts.template_marks import ROW_MISSES_TEMPLATE
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.trainers import read_trainer_config
from tests import chat_templates as of
from tests.command import Command
from tests.learner.data.test_chat_turns import PLAIN, make_tokenizer


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer alone: nothing else is read."""
    make_tokenizer(PLAIN).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


NOTE = ROW_MISSES_TEMPLATE


def pair(chosen: str, rejected: str) -> dict[str, str]:
    return {"prompt": "hi ", "chosen": chosen, "rejected": rejected}


def found(findings: dict[str, Finding]) -> dict[str, int]:
    return {name: finding.count for name, finding in findings.items()}


def test_pairs_are_compared_by_their_tokens(tmp_path: Path, model: Path) -> None:
    rows = [pair("a", "b"), pair("b", "a"), pair("a", "b"), pair("a", "a"), pair("a" * 9, "b")]
    given = {
        "model": {"path": str(model)},
        "data": {
            "train": write(tmp_path / "train.jsonl", *rows),
            "eval": write(tmp_path / "eval.jsonl", rows[0], pair("b", "hi")),
            "max_tokens": 8,
        },
    }
    report = check_rows(read_trainer_config("dpo", given), examples=1)
    train, held_out = report.sources
    assert found(train.findings) == {
        "the pair is there the other way round": 1,
        "the row is there twice": 1,
        "chosen and rejected are the same": 1,
        "the row is left out: it is too long": 1,
        NOTE: 4,
    }
    assert found(held_out.findings) == {"the row is held out, and trained on": 1, NOTE: 2}
    assert (train.rows, train.lengths.total(), report.errors) == (5, 4, [])
    assert "  tokens of a row (at most 8): least 5, median 5, 95% 5, 99% 5, most 5" in list(lines(report))
    assert to_json(report)["sources"][0]["row_tokens"]["most"] == 5


def test_an_end_that_the_model_does_not_name_is_noted(tmp_path: Path, model: Path) -> None:
    given = {"model": {"path": str(model)}, "data": {"train": write(tmp_path / "rows.jsonl", pair("a", "b"))}}
    assert not check_rows(read_trainer_config("dpo", given), examples=1).remarks
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 0}))
    report = check_rows(read_trainer_config("dpo", given), examples=1)
    (remark,) = report.remarks
    assert re.match(r"model\.path: its files name .* \(0\), and training ends turns or texts with .* \(1\)\.", remark)
    assert f"note: {remark}" in list(lines(report))
    assert to_json(report)["remarks"] == [remark]
    # A reward model generates nothing.
    assert not check_rows(read_trainer_config("rm", given), examples=1).remarks


def test_rows_that_cannot_be_used_are_named(tmp_path: Path, model: Path) -> None:
    long = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a" * 40}]}
    fine = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}]}
    given: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"train": write(tmp_path / "d.jsonl", fine, long), "max_tokens": 24, "on_long": "refuse"},
    }
    (source,) = check_rows(read_trainer_config("sft", given), examples=3).sources
    (unusable,) = source.findings.values()
    assert (unusable.count, unusable.what.partition(",")[0]) == (1, "the row cannot be used: raise data.max_tokens")
    assert "d.jsonl, row 1: it has" in unusable.examples[0]
    given["data"]["train"] = write(tmp_path / "other.jsonl", {"question": "hi"})
    unusable, none = check_rows(read_trainer_config("sft", given), examples=3).errors
    assert "other.jsonl, row 0: its fields are question" in unusable.examples[0]
    assert none.what == "no row of the source can be used"


def test_the_causes_of_rows_that_are_left_out_are_told_apart(tmp_path: Path, model: Path) -> None:
    asked, said = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "a"}
    rows = [
        [asked, said],
        [asked, {**said, "content": "a" * 40}],
        [asked, {**said, "weight": 0}],
        [asked, {**said, "content": "b" * 40}],
    ]
    data = {
        "train": write(tmp_path / "d.jsonl", *({"messages": messages} for messages in rows)),
        "max_tokens": 24,
    }
    given = {"model": {"path": str(model)}, "data": data}
    (source,) = check_rows(read_trainer_config("sft", given), examples=1).sources
    assert [(finding.what, finding.count, finding.examples) for finding in source.findings.values()] == [
        ("the row is left out: it is too long", 2, [f"{data['train']}, row 1"]),
        ("the row is left out: nothing of it is trained", 1, [f"{data['train']}, row 2"]),
    ]


@pytest.mark.parametrize(
    ("command", "rows"),
    [
        ("sft", [{"prompt": "hi", "completion": "a"}]),
        ("dpo", [{"prompt": "hi", "chosen": "a", "rejected": "b"}]),
        ("rm", [{"prompt": "hi", "chosen": "a", "rejected": "b"}]),
        ("kto", [{"prompt": "hi", "completion": text, "label": text == "a"} for text in "ab"]),
    ],
)
def test_texts_beside_a_chat_template_are_noted(
    command: str, rows: list[dict[str, Any]], tmp_path: Path, model: Path
) -> None:
    given: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"train": write(tmp_path / "d.jsonl", *rows)},
        **({"loss": {"name": "kto"}} if command == "kto" else {}),
    }
    command = {"kto": "dpo"}.get(command, command)
    report = check_rows(read_trainer_config(command, given), examples=1)
    assert (report.errors, report.warnings) == ([], [])
    assert [(note.what, note.count) for note in report.notes] == [(NOTE, len(rows))]
    assert NOTE.endswith("set data.as_chat: true")
    assert (list(lines(report))[-1], to_json(report)["notes"]) == ("errors: 0, warnings: 0, notes: 1", 1)
    given["data"]["as_chat"] = True
    report = check_rows(read_trainer_config(command, given), examples=1)
    assert list(lines(report))[-1] == "nothing is wrong"
    assert report.row[0].text.startswith("[u]hi|[a]")


@pytest.mark.parametrize(("label", "words"), [(True, "are true: .* add bad"), (False, "are false: .* add good")])
def test_labels_that_are_all_the_same_are_found(label: bool, words: str, tmp_path: Path, model: Path) -> None:
    def row(text: str, label: bool) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": "hi"}], "completion": text, "label": label}

    one = write(tmp_path / "one.jsonl", row("a", label), row("b", label))
    two = write(tmp_path / "two.jsonl", row("hi", label))
    held_out = write(tmp_path / "eval.jsonl", row("yo", not label))
    given: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"train": [one, two], "eval": held_out},
        "loss": {"name": "kto"},
    }
    report = check_rows(read_trainer_config("dpo", given), examples=1)
    assert [(warning.count, warning.examples) for warning in report.warnings] == [(2, [one]), (1, [two])]
    assert all(re.search(words, warning.what) for warning in report.warnings)
    # Sources may have a label each.
    given["data"]["train"] = [one, write(tmp_path / "two.jsonl", row("hi", not label))]
    assert check_rows(read_trainer_config("dpo", given), examples=1).warnings == []


def test_all_pairs_that_cannot_be_used_are_found(tmp_path: Path, model: Path) -> None:
    rows: list[dict[str, Any]] = [pair("a", "b" * (index + 1)) for index in range(300)]
    for index in (5, 280):
        del rows[index]["rejected"]
    rows[290]["chosen"] = 3
    given = {"model": {"path": str(model)}, "data": {"train": write(tmp_path / "pairs.jsonl", *rows)}}
    for command in ("rm", "dpo"):
        report = check_rows(read_trainer_config(command, given), examples=2)
        lacking, other = report.errors
        assert lacking.what.startswith("the row cannot be used: a pair has `chosen` and `rejected`")
        assert [example.split("pairs.jsonl, ")[1].split(", ")[0] for example in lacking.examples] == [
            "row 5: field `rejected` is missing",
            "row 280: field `rejected` is missing",
        ]
        assert (other.what, other.count) == ("the row cannot be used", 1), "forms are recited where fields are missing"
        assert "row 290: field `chosen` is int" in other.examples[0]
        assert (report.sources[0].rows, report.sources[0].lengths.total()) == (300, 297)


def test_the_command_reads_the_configuration_of_a_trainer(tmp_path: Path, model: Path, rollmesh: Command) -> None:
    single = {"prompt": [{"role": "user", "content": "hi"}], "completion": "a", "label": True}
    data = write(tmp_path / "d.jsonl", single, {**single, "completion": "b", "label": False})
    config = tmp_path / "kto.yaml"
    config.write_text(f"model: {{path: {model}}}\ndata: {{train: {data}}}\nloss: {{name: kto}}\n")
    assert "nothing is wrong" in rollmesh("data", "check", str(config), "--for", "dpo").stdout
    wrong = rollmesh("data", "check", str(config), "--for", "dpo", "--loss.name=sigmoid")
    assert wrong.returncode == DataError.exit_code
    assert "field `chosen` is missing" in wrong.stdout
    assert "single responses with labels are trained with loss.name: kto" in wrong.stdout
    unknown = rollmesh("data", "check", str(config), "--for", "ppo")
    assert unknown.returncode == ConfigError.exit_code
    assert "known: run, sft, rm, dpo" in unknown.stderr


def test_the_template_and_a_row_as_it_is_trained_are_shown(tmp_path: Path, rollmesh: Command) -> None:
    of.tokenizer_for(of.NEXT_ROLE).save_pretrained(tmp_path / "model")
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    given = {
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": write(tmp_path / "train.jsonl", {"messages": chat})},
    }
    report = check_rows(read_trainer_config("sft", given), examples=1)
    assert [(piece.text, piece.trained) for piece in report.row] == [
        ("<|user|>hi<|assistant|>", False),
        ("yes<|user|>", True),
    ]
    text = "\n".join(lines(report, emphasize=str.upper))
    assert '  context  "<|user|>hi<|assistant|>"\n  trained  "YES<|USER|>"' in text
    assert "(4 of 8 tokens count)" in text
    ends = "<|user|> or <|tool|>, the first token of the next message"
    assert ends in text
    assert ends in to_json(report)["template"]["end of a turn"]
    pairs = {"prompt": "hi", "chosen": [chat[1]], "rejected": [{"role": "assistant", "content": "no"}]}
    scored = check_rows(
        read_trainer_config("rm", {**given, "data": {"train": write(tmp_path / "p.jsonl", pairs)}}), examples=1
    )
    # A reward model's result is read at the last token.
    assert [(piece.text, piece.trained) for piece in scored.row][-1] == ("<|im_end|>", True)
    # A model folder is enough.
    shown = rollmesh("data", "check", "--template", str(tmp_path / "model"))
    assert ends in shown.stdout
    assert (
        ends
        in json.loads(rollmesh("data", "check", "--template", str(tmp_path / "model"), "--json").stdout)[
            "end of a turn"
        ]
    )
    missing = rollmesh("data", "check")
    assert missing.returncode == ConfigError.exit_code
    assert "CFG.YAML is missing" in missing.stderr
