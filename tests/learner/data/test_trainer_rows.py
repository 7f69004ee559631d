"""Rows of trainers in the forms of TRL and verl, and the errors of others."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.data.dataset import open_rows
from rollmesh.learner.data.examples import Example, ExampleForm
from rollmesh.learner.data.preference_rows import LabeledForm, PairForm, ScoredPairForm
from rollmesh.learner.data.records import Record
from rollmesh.learner.data.supervised_rows import SupervisedForm
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.config.trainers.sections import RowsSection, SupervisedRowsSection
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.scored_text import scored_tokens
from tests.learner.data.test_chat_turns import ANOTHER_END, LINES, MARKED, PLAIN, make_tokenizer

TOKENIZER = make_tokenizer(PLAIN)
CHAT = ChatEncoder(TOKENIZER)
# The beginning of an answer, which a marked template has for none of its own.
_A = "{% if add_generation_prompt %}[a]{% endif %}"

ROWS = Path("rows.jsonl")


def read(form: ExampleForm, record: Record) -> Example | None:
    """Checks a record, and makes its example."""
    form.check(ROWS, 0, record, tuple(record))
    return form.parse(ROWS, 0, record, tuple(record))


def pairs(record: Record) -> Example | None:
    return read(PairForm(CHAT, RowsSection.model_validate({"train": "x"}), "prompt"), record)


def scored(record: Record, tokenizer: PreTrainedTokenizerFast = TOKENIZER, **settings: Any) -> Example | None:
    section = RowsSection.model_validate({"train": "x", **settings})
    return read(ScoredPairForm(ChatEncoder(tokenizer), section, "prompt"), record)


def labeled(record: Record) -> Example | None:
    return read(LabeledForm(CHAT, RowsSection.model_validate({"train": "x"}), "prompt"), record)


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
    section = SupervisedRowsSection.model_validate({"train": "x", **settings})
    return read(SupervisedForm(CHAT, section, section.prompt_key), record)


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
    for kind in (pairs, labeled):
        with pytest.raises(DataError, match="row 0: it has images"):
            kind(record)
    assert supervised({**record, "images": []}) is not None


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "image"}])
def test_parts_of_messages_that_are_no_texts_are_refused(part: dict[str, Any]) -> None:
    """A template would write their marks as text."""
    shown = {"role": "user", "content": [{"type": "text", "text": "hi"}, part]}
    chats = {"prompt": [shown], "completion": TURNS[1:2], "label": True, "chosen": TURNS[1:2], "rejected": TURNS[3:]}
    for kind, record in ((supervised, {"messages": [shown, TURNS[1]]}), (pairs, chats), (labeled, chats)):
        with pytest.raises(DataError, match=rf"row 0: field `\w+\[0\].content` has a part of type '{part['type']}'"):
            kind(record)


def test_long_rows_are_left_out_or_refused() -> None:
    row = {"prompt": "hi ", "completion": "yoyo"}
    assert supervised(row, max_tokens=5) is None
    with pytest.raises(DataError, match="row 0: it has 8 tokens"):
        supervised(row, max_tokens=5, on_long="refuse")
    assert supervised(row, max_tokens=3, on_long="truncate") is None


def test_a_reward_model_reads_the_end_of_the_response() -> None:
    record = {"prompt": "hi ", "chosen": "a", "rejected": "bb", "margin": 2}
    example = scored(record)
    assert example is not None
    assert [text(sequence.response_ids[:-1]) for sequence in example.sequences] == ["a|", "bb|"]
    assert [sequence.response_mask.tolist() for sequence in example.sequences] == [[0, 0, 1], [0, 0, 0, 1]]
    assert example.values == {"margin": (2.0, 2.0)}


@pytest.mark.parametrize("margin", [math.nan, math.inf, -math.inf, 1e308, -3.5e38, 10**400])
def test_margins_that_no_loss_can_have_are_refused_before_training(margin: float) -> None:
    form = ScoredPairForm(CHAT, RowsSection.model_validate({"train": "x"}), "prompt")
    record = {"prompt": "hi ", "chosen": "a", "rejected": "bb", "margin": margin}
    for look in (form.check, form.parse):
        with pytest.raises(DataError, match=r"rows\.jsonl, row 0: field `margin` is .*, expected a finite number"):
            look(ROWS, 0, record, tuple(record))


@pytest.mark.parametrize("margin", [0, -1.5, 3.4e38, 10**30])
def test_margins_may_be_large_and_negative(margin: float) -> None:
    example = scored({"prompt": "hi ", "chosen": "a", "rejected": "bb", "margin": margin})
    assert example is not None
    assert example.values == {"margin": (float(margin),) * 2}


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("template", [PLAIN, LINES, MARKED, ANOTHER_END, "<s>" + PLAIN])
def test_a_reward_model_is_trained_on_the_tokens_that_it_is_served_with(template: str, begins: bool) -> None:
    """Generators give it the text of the prompt, and that of the response without special tokens."""
    tokenizer = make_tokenizer(template, begins=begins)
    example = scored({"prompt": TURNS[:3], "chosen": TURNS[3:], "rejected": [message("assistant", "cc")]}, tokenizer)
    assert example is not None
    prompt = tokenizer.apply_chat_template(
        TURNS[:3], add_generation_prompt=True, tokenize=False, chat_template=template.replace(MARKED, MARKED + _A)
    )
    for sequence, response in zip(example.sequences, ("b", "cc"), strict=True):
        served = scored_tokens(tokenizer, prompt, response).ids.tolist()
        assert [*sequence.prompt_ids, *sequence.response_ids[:-1]] == served
        assert served[-1] == tokenizer.eos_token_id
        assert served.count(tokenizer.bos_token_id) == int(begins)


def test_a_scored_response_that_is_cut_off_ends_as_all_do() -> None:
    record = {"prompt": "hi ", "chosen": "abcd", "rejected": "b"}
    example = scored(record, max_tokens=6, on_long="truncate")
    assert example is not None
    assert [text(sequence.response_ids[:-1]) for sequence in example.sequences] == ["ab|", "b|"]


def test_labeled_rows_are_single_responses() -> None:
    example = labeled({"prompt": "hi ", "completion": "a", "label": False})
    assert parts(example) == [("hi ", "a|")]
    assert example is not None
    assert example.values == {"label": (0.0,)}


@pytest.mark.parametrize("label", [True, False, 1, 0])
def test_labels_are_true_or_false(label: int) -> None:
    example = labeled({"prompt": "hi ", "completion": "a", "label": label})
    assert example is not None
    assert example.values == {"label": (float(label),)}


@pytest.mark.parametrize("label", [-1, 2, 1.0, 0.5, math.nan, "good", "true", 10**400, [True]])
def test_other_labels_are_refused(label: object) -> None:
    with pytest.raises(DataError, match=r"rows\.jsonl, row 0: field `label` is .*, expected true or false"):
        labeled({"prompt": "hi ", "completion": "a", "label": label})


def test_trainers_read_the_sources_of_runs(tmp_path: Path) -> None:
    """The same rows from a pattern of JSONL files, a Parquet file and a saved dataset, each row checked at once."""
    rows = [{"prompt": "hi ", "chosen": "a" * (index + 1), "rejected": "b"} for index in range(4)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n\n" for row in rows[:2]))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[2:]))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=2)
    form = PairForm(CHAT, RowsSection.model_validate({"train": "x"}), "prompt")
    for name in ("*.jsonl", "rows.parquet"):
        source = open_rows(DataSource(path=str(tmp_path / name)), form)
        assert [parts(example)[0] for example in source.rows([3, 0])] == [("hi ", "aaaa|"), ("hi ", "a|")]
    (tmp_path / "bad.jsonl").write_text(json.dumps(rows[0]) + '\n{"prompt": "hi", "chosen": "a"}\n')
    pq.write_table(pa.Table.from_pylist([*rows, {**rows[0], "rejected": None}]), tmp_path / "null.parquet")
    for name, row in (("bad.jsonl", 1), ("null.parquet", 4)):
        with pytest.raises(DataError, match=rf"{name}, row {row}: field `rejected` is missing"):
            open_rows(DataSource(path=str(tmp_path / name)), form)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": None}, "row 7: its fields are messages"),
        ({"messages": []}, "row 7: field `messages` is empty"),
        (
            {"messages": [{"role": "user", "content": None}, TURNS[1]]},
            r"row 7: field `messages\[0\].content` is missing",
        ),
        ({"messages": TURNS[:1]}, "row 7: no message of the assistant"),
    ],
)
def test_conversations_of_tables_are_looked_at_before_the_first_step(
    tmp_path: Path, row: dict[str, Any], words: str
) -> None:
    """Columns have types, but a conversation of the right type may have nothing to train."""
    rows = [*({"messages": TURNS} for _ in range(7)), row, *({"messages": TURNS} for _ in range(2))]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=4)
    section = SupervisedRowsSection.model_validate({"train": "x"})
    with pytest.raises(DataError, match=words):
        open_rows(DataSource(path=str(tmp_path / "rows.parquet")), SupervisedForm(CHAT, section, "prompt"))


def test_large_tables_are_checked_row_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one alone tells too little: later ones may have another form."""
    monkeypatch.setattr("rollmesh.learner.data.tables.HELD_BYTES", 1)
    rows: list[dict[str, Any]] = [{"messages": TURNS, "text": None} for _ in range(6)]
    section = SupervisedRowsSection.model_validate({"train": "x"})
    form = SupervisedForm(CHAT, section, "prompt")
    path = tmp_path / "rows.parquet"
    rows[2] = {"messages": None, "text": "hi"}
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    assert len(open_rows(DataSource(path=str(path)), form)) == 6
    rows[4] = {"messages": None, "text": None}
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=6)
    with pytest.raises(DataError, match="row 4: its fields are messages, text"):
        open_rows(DataSource(path=str(path)), form)


@pytest.mark.parametrize(
    ("read_as", "record", "advice"),
    [
        (pairs, {"prompt": "hi", "chosen": "a"}, "a pair has `chosen` and `rejected`"),
        (pairs, {"prompt": "hi", "completion": "a", "label": True}, "loss.name: kto"),
        (scored, {"prompt": "hi", "completion": "a", "label": True}, "`rollmesh dpo` with loss.name: kto"),
        (labeled, {"prompt": "hi", "chosen": "a", "rejected": "b"}, "loss.name: sigmoid"),
        (labeled, {"prompt": "hi", "completion": "a"}, "`prompt`, `completion` and `label`"),
        (supervised, {"prompt": "hi", "chosen": "a", "rejected": "b"}, "`rollmesh dpo` and `rollmesh rm`"),
    ],
)
def test_rows_of_another_command_are_told_where_they_belong(
    read_as: Callable[[Record], object], record: Record, advice: str
) -> None:
    with pytest.raises(DataError, match="row 0: ") as caught:
        read_as(record)
    assert advice in caught.value.hint


def test_a_value_of_another_kind_is_told_alone() -> None:
    with pytest.raises(DataError, match="row 0: field `chosen` is int") as caught:
        pairs({"prompt": "hi", "chosen": 3, "rejected": "b"})
    assert caught.value.hint == ""


def test_a_source_that_is_not_checked_has_errors_in_its_rows(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"prompt": "hi ", "chosen": "a", "rejected": "b"} for _ in range(4)]
    rows[1]["rejected"] = None
    (tmp_path / "a.jsonl").write_text("not JSON\n" + "".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "b.parquet")
    form = PairForm(CHAT, RowsSection.model_validate({"train": "x"}), "prompt")
    for name, row in (("a.jsonl", 0), ("a.jsonl", 2), ("b.parquet", 1)):
        source = open_rows(DataSource(path=str(tmp_path / name)), form, checked=False)
        assert parts(source.rows([3])[0]) == [("hi ", "a|"), ("hi ", "b|")]
        with pytest.raises(DataError, match=f"{name}, row {row}: "):
            source.rows([row])
