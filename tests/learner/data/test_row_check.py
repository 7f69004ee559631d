"""All rows of a start are looked at before anything is trained, and do not hold up the start."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollmesh.learner.data import row_check
from rollmesh.learner.data.chat_turns import ChatEncoder
from rollmesh.learner.data.dataset import open_rows, row_form
from rollmesh.learner.data.order import DataOrder
from rollmesh.learner.data.prompts import PromptEncoder, TaskShape
from rollmesh.learner.data.records import Record
from rollmesh.learner.data.row_check import RowCheck
from rollmesh.learner.data.rows import Row
from rollmesh.learner.data.stream import PromptStream
from rollmesh.learner.data.supervised_rows import SupervisedForm
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.config.trainers.sections import SupervisedRowsSection
from rollmesh.mesh.errors import DataError, StuckError
from tests import chat_templates as of
from tests.learner.data.conftest import record, write_jsonl
from tests.learner.data.test_chat_turns import PLAIN, make_tokenizer

TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('odd') }}"
    "{% endif %}[{{ m.role[0] }}]{{ m.content }}|{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
)


def written(path: Path, rows: Sequence[dict[str, Any]]) -> DataSource:
    if path.suffix == ".jsonl":
        write_jsonl(path, list(rows))
    else:
        pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=5)
    return DataSource(path=str(path))


def supervised(template: str = PLAIN) -> SupervisedForm:
    section = SupervisedRowsSection.model_validate({"train": "x"})
    return SupervisedForm(ChatEncoder(make_tokenizer(template)), section, "prompt")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
@pytest.mark.parametrize(
    ("late", "tools", "words"),
    [
        ("hello", "", "field `messages` is a text, and no JSON"),
        (TURNS[:1], "", "no message of the assistant"),
        (TURNS, "f(x)", "field `tools` is a text, and no JSON"),
    ],
)
def test_a_late_row_is_named(tmp_path: Path, name: str, late: Any, tools: str, words: str) -> None:
    # As texts, because a column of a table has one type.
    texts = [json.dumps(TURNS), late if isinstance(late, str) else json.dumps(late)]
    rows = [{"messages": texts[number == 10], "tools": tools if number == 10 else ""} for number in range(12)]
    source = written(tmp_path / name, rows)
    with pytest.raises(DataError, match=rf"{name}, row 10: {words}"):
        RowCheck([(source, supervised())]).wait()
    RowCheck([(written(tmp_path / name, rows[:10]), supervised())], made=10).wait()


def test_a_row_with_a_token_that_the_model_has_no_embedding_for_is_named(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(PLAIN)
    places = len(tokenizer)
    tokenizer.add_tokens(["<pad>"], special_tokens=True)
    said = [TURNS[0], {"role": "assistant", "content": "yes<pad>"}]
    source = written(tmp_path / "rows.jsonl", [{"messages": TURNS}] * 3 + [{"messages": said}])
    section = SupervisedRowsSection.model_validate({"train": "x"})
    form = SupervisedForm(ChatEncoder(tokenizer, {}, places), section, "prompt")
    words = rf"rows.jsonl, row 3: it holds '<pad>' \({places}\), and the embedding of the model ends at {places - 1}"
    with pytest.raises(DataError, match=words):
        RowCheck([(source, form)], made=10).wait()
    RowCheck([(source, supervised())], made=3).wait()
    encoder = PromptEncoder(tokenizer, max_prompt_tokens=99, template_kwargs={}, places=places)
    with pytest.raises(DataError, match=r"it holds '<pad>'"):
        encoder.ids(Row("a<pad>", "d", None, {}))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_late_row_that_its_template_refuses_is_named(tmp_path: Path, name: str) -> None:
    rows = [{"messages": TURNS}] * 12
    rows[10] = {"messages": [*TURNS, TURNS[1]]}
    source = written(tmp_path / name, rows)
    RowCheck([(source, supervised(ALTERNATING))]).wait()
    with pytest.raises(
        DataError, match=rf"{name}, row 10: the chat template refuses a conversation of user assistant assistant: odd"
    ):
        RowCheck([(source, supervised(ALTERNATING))], made=12).wait()


LOST = [
    ([{"role": "critic", "content": "bad"}], {}, "message 0 has the role critic"),
    ([TURNS[0], TURNS[1], {"role": "system", "content": "be kind"}], {}, "message 2 has the role system"),
    ([], {"tools": [{"name": "f", "parameters": {}}]}, "the row has tools"),
    ([], {"chat_template_kwargs": {"documents": ["a fact"]}}, "chat_template_kwargs has documents"),
]


@pytest.mark.parametrize(("before", "fields", "words"), LOST)
def test_a_row_after_the_rendered_ones_is_refused_when_it_is_drawn(
    tmp_path: Path, before: list[dict[str, Any]], fields: dict[str, Any], words: str
) -> None:
    tokenizer = of.tokenizer_for(of.KNOWN_ROLES.replace("{% if tools %}", "{% if false %}"))
    section = SupervisedRowsSection.model_validate({"train": "x"})
    form = SupervisedForm(ChatEncoder(tokenizer), section, "prompt")
    rows: list[dict[str, Any]] = [{"messages": TURNS}] * 12
    rows[10] = {"messages": [*before, *TURNS], **fields}
    source = written(tmp_path / "rows.jsonl", rows)
    RowCheck([(source, form)], made=9).wait()
    opened = open_rows(source, form, checked=False)
    assert None not in opened.rows([0, 9, 11])
    with pytest.raises(DataError, match=rf"rows\.jsonl, row 10: {words}") as caught:
        opened.rows([9, 10])
    assert caught.value.hint


@pytest.mark.parametrize(("before", "fields", "words"), LOST)
def test_a_late_prompt_is_refused_when_it_is_drawn(
    tmp_path: Path, before: list[dict[str, Any]], fields: dict[str, Any], words: str
) -> None:
    tokenizer = of.tokenizer_for(of.KNOWN_ROLES.replace("{% if tools %}", "{% if false %}"))
    rows = [record(index, prompt=TURNS[:1]) for index in range(12)]
    rows[10] = {**record(10, prompt=[*before, *TURNS[:1]]), **fields}
    source = written(tmp_path / "rows.jsonl", rows)
    form = row_form(source, "prompt")
    RowCheck([(source, form)]).wait()
    stream = PromptStream(
        open_rows(source, form, checked=False),
        DataOrder(12, seed=0, shuffle=False, epochs=1),
        PromptEncoder(tokenizer, max_prompt_tokens=999, template_kwargs={}),
        TaskShape(n=1, temperature=1.0, max_tokens=9),
        on_refused="skip",
    )
    assert len(stream.after(0, 10).tasks) == 10
    with pytest.raises(DataError, match=rf"rows\.jsonl, row 10: {words}"):
        stream.after(10, 1)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_prompts_of_tables_are_looked_at_too(tmp_path: Path, name: str) -> None:
    """Their columns have types, but a conversation of the right type may be none."""
    rows = [record(index, prompt=[{"role": "user", "content": "hi"}]) for index in range(12)]
    rows[10]["prompt"] = [{"role": "user", "content": None}]
    source = written(tmp_path / name, rows)
    with pytest.raises(DataError, match=rf"{name}, row 10: field `prompt\[0\].content` is (null|missing)"):
        RowCheck([(source, row_form(source, "prompt"))]).wait()


def test_every_source_is_looked_at_as_far_as_it_is_used(tmp_path: Path) -> None:
    good = written(tmp_path / "a.jsonl", [{"messages": TURNS}] * 3)
    bad = written(tmp_path / "b.jsonl", [{"messages": TURNS}, {"messages": []}])
    with pytest.raises(DataError, match=r"b\.jsonl, row 1"):
        RowCheck([(good, supervised()), (bad, supervised())]).wait()
    RowCheck([(good, supervised()), (bad.model_copy(update={"rows": 1}), supervised())]).wait()
    for name in ("*.jsonl", "b.jsonl"):
        with pytest.raises(DataError, match=r"b\.jsonl, row 1"):
            open_rows(DataSource(path=str(tmp_path / name)), supervised())


@dataclass
class Gate:
    """The form of rows whose check waits for the test."""

    open: threading.Event = field(default_factory=threading.Event)
    reached: threading.Event = field(default_factory=threading.Event)

    def columns(self, names: Collection[str]) -> list[str]:
        return list(names)

    def check(self, path: Path, index: int, record: Record, names: Collection[str]) -> None:
        if index == 2:
            self.reached.set()
            self.open.wait(60)

    def parse(self, path: Path, index: int, record: Record, names: Collection[str]) -> Record:
        return record


@pytest.fixture
def gate(tmp_path: Path) -> Any:
    gate = Gate()
    check = RowCheck([(written(tmp_path / "a.jsonl", [{"text": "x"}] * 5), gate)])
    assert gate.reached.wait(60)
    yield gate, check
    gate.open.set()


def test_rows_are_read_next_to_the_start(
    gate: tuple[Gate, RowCheck], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    form, check = gate
    assert not check.within(0)
    told: Callable[..., None] = row_check.log.info

    def info(*args: Any) -> None:
        told(*args)
        form.open.set()

    monkeypatch.setattr(row_check, "_EVERY_S", 0.0)
    monkeypatch.setattr(row_check.log, "info", info)
    with caplog.at_level(logging.INFO):
        check.wait()
    assert "reads the rows: 2 of 5" in caplog.messages
    assert check.within(0)


def test_rows_that_do_not_come_end_the_start(gate: tuple[Gate, RowCheck], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_check, "_EVERY_S", 0.0)
    monkeypatch.setattr(row_check, "_STUCK_S", 0.0)
    with pytest.raises(StuckError, match="no row has been read for 0 s, after 2 of 5") as caught:
        gate[1].wait()
    assert "the disk that holds data.train" in caught.value.hint
