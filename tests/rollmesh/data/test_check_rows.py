"""`rollmesh data check --for`: everything that a trainer would leave out, or end by, is found before."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaConfig

from examples.chats import chat_tokenizer
from rollmesh.data.check import DataReport
from rollmesh.data.check_rows import check_rows
from rollmesh.mesh.errors import DataError
from rollmesh.trainers import read_trainer_config
from tests.command import in_this_process
from tests.learner.data.conftest import write_jsonl


def pair(index: int, **changes: Any) -> dict[str, Any]:
    return {"prompt": f"{index}+1=", "chosen": str(index + 1), "rejected": str(index), **changes}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, and the longest sequence of a model: nothing else is read."""
    folder = tmp_path_factory.mktemp("model")
    chat_tokenizer(string.digits + "+=").save_pretrained(folder)
    LlamaConfig(max_position_embeddings=12).save_pretrained(folder)
    return folder


def check(command: str, model: Path, folder: Path, rows: list[Any], held_out: list[Any] | None = None) -> DataReport:
    data = {"train": str(write_jsonl(folder / "train.jsonl", rows))}
    if held_out is not None:
        data["eval"] = str(write_jsonl(folder / "eval.jsonl", held_out))
    given = {"model": {"path": str(model)}, "data": data}
    return check_rows(read_trainer_config(command, given), examples=2)


def found(report: DataReport) -> list[tuple[str, bool, int, str]]:
    """(what, fails, count, first example without its file) of each finding."""
    return [
        (one.what, one.fails, one.count, one.examples[0].split(".jsonl, ", 1)[-1])
        for source in report.sources
        for one in source.findings.values()
    ]


@pytest.mark.parametrize("command", ["rm", "dpo"])
def test_all_pairs_that_cannot_be_used_are_found(command: str, model: Path, tmp_path: Path) -> None:
    rows = [pair(index) for index in range(300)]
    for index in (5, 280):
        del rows[index]["rejected"]
    rows[290]["chosen"] = 3
    report = check(command, model, tmp_path, rows)
    lacking, other = found(report)
    assert lacking[0].startswith("the row cannot be used: a pair has `chosen` and `rejected`")
    assert lacking[1:] == (True, 2, "row 5: field `rejected` is missing, expected a text or a list of messages")
    assert other == (
        "the row cannot be used",
        True,
        1,
        "row 290: field `chosen` is int, expected a text or a list of messages",
    )
    assert (report.sources[0].rows, sum(report.sources[0].lengths.values())) == (300, 297)


def test_rows_of_another_command_are_told_where_they_belong(model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "completion": "2", "label": True}]
    (unusable, nothing) = found(check("dpo", model, tmp_path, rows))
    assert unusable[0].endswith("trained with loss.name: kto")
    assert nothing[0] == "no row of the source can be used"


def test_pairs_that_contradict_each_other_or_leak_are_found(model: Path, tmp_path: Path) -> None:
    turned = pair(1, chosen="1", rejected="2")
    rows = [pair(0), pair(1), pair(0), turned, pair(4, rejected="5"), pair(6, chosen="7" * 20)]
    report = check("dpo", model, tmp_path, rows, held_out=[pair(1), pair(8)])
    assert [(what, fails, count) for what, fails, count, _ in found(report)] == [
        ("the row is there twice", False, 1),
        ("the pair is there the other way round", False, 1),
        ("chosen and rejected are the same", False, 1),
        ("the row is left out: it is too long, or nothing of it is trained", False, 1),
        ("the row is held out, and trained on", False, 1),
    ]


def test_the_command_reads_a_trainers_configuration(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rollmesh = in_this_process(monkeypatch, capsys)
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "completion": "2"}, {"prompt": "1+1="}])
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump({"model": {"path": str(model)}, "data": {"train": str(rows)}}))
    checked = rollmesh("data", "check", str(tmp_path / "sft.yaml"), "--for", "sft", "--json")
    assert checked.returncode == DataError.exit_code
    (source,) = json.loads(checked.stdout)["sources"]
    assert (source["rows"], source["row_tokens"]["most"]) == (2, 6)
    assert source["findings"][0]["count"] == 1
