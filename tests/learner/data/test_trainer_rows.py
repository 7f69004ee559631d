"""Rows of trainers in the forms of TRL and verl, and the errors of others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.data.examples import Example
from rollmesh.learner.data.preference_rows import LabeledRows, PairRows, scored_at_its_end, split_prompt
from rollmesh.learner.data.records import Record, open_records
from rollmesh.learner.data.supervised_rows import SupervisedRows
from rollmesh.mesh.config.trainers.sections import RowsSection, SupervisedRowsSection
from rollmesh.mesh.errors import DataError
from tests.learner.data.test_chat_turns import PLAIN, make_tokenizer

TOKENIZER = make_tokenizer(PLAIN)
CHAT = ChatEncoder(TOKENIZER)


class Records:
    """Records in memory."""

    def __init__(self, *records: Record) -> None:
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    def records(self, rows: Sequence[int]) -> list[Record]:
        return [self._records[row] for row in rows]


def text(ids: Any) -> str:
    return "".join(TOKENIZER.convert_ids_to_tokens(list(map(int, ids))))


def parts(example: Example | None) -> list[tuple[str, str]]:
    """Prompt and response of every sequence; tokens that are not trained as `_`."""
    assert example is not None
    found = []
    for sequence in example.sequences:
        masked = zip(sequence.response_ids, sequence.response_mask, strict=True)
        found.append((text(sequence.prompt_ids), "".join(text([token]) if mask else "_" for token, mask in masked)))
    return found


def supervised(record: Record, **settings: Any) -> Example | None:
    section = SupervisedRowsSection(train=Path("x"), **settings)
    return SupervisedRows(Records(record), CHAT, section).examples([0])[0]


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TURNS = [message("user", "hi"), message("assistant", "a"), message("user", "yo"), message("assistant", "b")]


@pytest.mark.parametrize(
    ("record", "settings", "expected"),
    [
        ({"messages": TURNS}, {}, ("[u]hi|[a]", "a|_________b|")),
        ({"messages": TURNS}, {"train_on": "last"}, ("[u]hi|[a]a|[u]yo|[a]", "b|")),
        ({"prompt": TURNS[:3], "completion": TURNS[3:]}, {}, ("[u]hi|[a]a|[u]yo|[a]", "b|")),
        ({"prompt": "hi ", "completion": "yo"}, {}, ("hi ", "yo|")),
        ({"prompt": "hi ", "response": "yo|"}, {}, ("hi ", "yo|")),
        ({"prompt": "hi", "completion": "yo"}, {"as_chat": True}, ("[u]hi|[a]", "yo|")),
        (
            {"extra_info": {"question": "hi", "answer": "yo"}},
            {"prompt_key": "extra_info.question", "response_key": "extra_info.answer"},
            ("hi", "yo|"),
        ),
        ({"text": "hi yo"}, {}, ("h", "i yo|")),
        ({"prompt": "hi ", "completion": "yoyo"}, {"max_tokens": 5, "on_long": "truncate"}, ("hi ", "yo")),
    ],
)
def test_supervised_rows(record: Mapping[str, Any], settings: dict[str, Any], expected: tuple[str, str]) -> None:
    assert parts(supervised(record, **settings)) == [expected]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"question": "hi"}, "row 0: its fields are question"),
        ({"messages": TURNS[:1]}, "row 0: no message of the assistant"),
        ({"messages": [{"content": "x"}]}, r"row 0: field `messages\[0\]` is no message"),
        ({"messages": []}, "row 0: field `messages` is empty"),
        ({"prompt": 3, "completion": "x"}, "row 0: field `prompt` is int"),
    ],
)
def test_rows_of_another_form_are_named(record: Mapping[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        supervised(record)


def test_rows_with_images_are_refused() -> None:
    record = {"prompt": "hi ", "completion": "a", "label": True, "chosen": "a", "rejected": "b", "images": ["a.png"]}
    with pytest.raises(DataError, match="row 0: it has images"):
        supervised(record)
    for kind in (PairRows, LabeledRows):
        with pytest.raises(DataError, match="row 0: it has images"):
            kind(Records(record), CHAT, RowsSection(train=Path("x"))).examples([0])
    assert supervised({**record, "images": []}) is not None


def test_long_rows_are_left_out_or_refused() -> None:
    row = {"prompt": "hi ", "completion": "yoyo"}
    assert supervised(row, max_tokens=5) is None
    with pytest.raises(DataError, match="row 0: it has 8 tokens"):
        supervised(row, max_tokens=5, on_long="refuse")
    assert supervised(row, max_tokens=3, on_long="truncate") is None


PAIR = [("[u]hi|[a]", "a|"), ("[u]hi|[a]", "b|")]


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": TURNS[:1], "chosen": [message("assistant", "a")], "rejected": [message("assistant", "b")]},
        {"chosen": TURNS[:2], "rejected": [TURNS[0], message("assistant", "b")]},
    ],
)
def test_pairs_with_a_prompt_or_a_common_beginning(record: Mapping[str, Any]) -> None:
    assert parts(PairRows(Records(record), CHAT, RowsSection(train=Path("x"))).examples([0])[0]) == PAIR


def test_texts_are_divided_before_a_word() -> None:
    assert split_prompt("say one", "say on") == ("say on", "e", "")
    assert split_prompt("say one", "say only") == ("say", " one", " only")
    assert split_prompt("one", "two") == ("", "one", "two")


def test_a_reward_model_reads_the_end_of_the_response() -> None:
    record = {"prompt": "hi ", "chosen": "a", "rejected": "bb", "margin": 2}
    rows = PairRows(Records(record), CHAT, RowsSection(train=Path("x")), make=scored_at_its_end, margins=True)
    (example,) = rows.examples([0])
    assert example is not None
    assert [text(sequence.response_ids[:-1]) for sequence in example.sequences] == ["a|", "bb|"]
    assert [sequence.response_mask.tolist() for sequence in example.sequences] == [[0, 0, 1], [0, 0, 0, 1]]
    assert example.values == {"margin": (2.0, 2.0)}


def test_labeled_rows_come_with_the_response_to_the_next_prompt() -> None:
    source = Records(
        {"prompt": "hi ", "completion": "a", "label": True}, {"prompt": "yo ", "completion": "b", "label": False}
    )
    first, second = LabeledRows(source, CHAT, RowsSection(train=Path("x"))).examples([0, 1])
    assert parts(first) == [("hi ", "a|"), ("hi ", "b|")]
    assert parts(second) == [("yo ", "b|"), ("yo ", "a|")]
    assert first is not None
    assert second is not None
    assert (first.values["label"][0], second.values["label"][0]) == (1.0, 0.0)


def test_files_are_read_by_row(tmp_path: Path) -> None:
    rows = [{"messages": [message("user", str(index))]} for index in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for name in ("rows.jsonl", "rows.parquet"):
        source = open_records(tmp_path / name, "data.train")
        assert len(source) == 3
        assert source.records([2, 0]) == [rows[2], rows[0]]
    for name, words in (("absent.jsonl", "does not exist"), ("rows.csv", "unknown form"), ("none.jsonl", "no rows")):
        if not name.startswith("absent"):
            (tmp_path / name).write_text("")
        with pytest.raises(DataError, match=f"data.train: .*{words}"):
            open_records(tmp_path / name, "data.train")
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n[]\n')
    with pytest.raises(DataError, match="row 1: expected an object, got list"):
        open_records(tmp_path / "bad.jsonl", "data.train").records([1])
