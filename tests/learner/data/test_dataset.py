"""Dataset files: the same rows from both forms, and errors that name row and field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollmesh.mesh.errors import DataError
from tests.learner.data.conftest import open_file, record, write_jsonl


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize(("write", "suffix"), [(write_jsonl, "jsonl"), (write_parquet, "parquet")])
def test_both_forms_give_the_same_rows_at_random(tmp_path: Path, write: Any, suffix: str) -> None:
    source = open_file(write(tmp_path / f"d.{suffix}", [record(i) for i in range(10)]))
    assert len(source) == 10
    first, second = source.rows([7, 2])
    assert (first.prompt, first.ground_truth, first.extra_info["index"]) == ("7+1=", "8", 7)
    assert second.prompt == "2+1="
    assert first.data_source == "addition"


def test_chat_messages_are_read_from_parquet(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1+1="}]
    source = open_file(write_parquet(tmp_path / "d.parquet", [record(0, prompt=messages)]))
    assert source.rows([0])[0].prompt == messages


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": ...}, "`prompt`"),
        ({"data_source": ...}, "`data_source`"),
        ({"reward_model": ...}, "`reward_model`"),
        ({"reward_model": {"style": "rule"}}, "`reward_model.ground_truth`"),
    ],
)
@pytest.mark.parametrize(("write", "suffix"), [(write_jsonl, "jsonl"), (write_parquet, "parquet")])
def test_a_missing_field_is_named_with_its_row(
    tmp_path: Path, write: Any, suffix: str, changes: dict[str, Any], field: str
) -> None:
    rows = [record(0), record(1), record(2, **changes)]
    with pytest.raises(DataError, match="row 2") as caught:
        open_file(write(tmp_path / f"d.{suffix}", rows))
    assert field in str(caught.value)
    assert "d." in str(caught.value)


def test_a_parquet_column_that_no_row_has(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"row 0: field `reward_model`"):
        open_file(write_parquet(tmp_path / "d.parquet", [record(0, reward_model=...)]))


@pytest.mark.parametrize(
    ("prompt", "field"),
    [(3, "prompt"), ([{"role": "user"}], r"prompt\[0\].content"), (["text"], "prompt")],
)
def test_a_malformed_prompt_is_named(tmp_path: Path, prompt: Any, field: str) -> None:
    with pytest.raises(DataError, match=field):
        open_file(write_jsonl(tmp_path / "d.jsonl", [record(0, prompt=prompt)]))


def test_another_prompt_key(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "d.jsonl", [record(0, prompt=..., question="2+2=")])
    assert open_file(path, "question").rows([0])[0].prompt == "2+2="


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        open_file(tmp_path / "absent.parquet")
    for name, content, words in [
        ("bad.jsonl", "{", "row 0: not valid JSON"),
        ("twice.jsonl", '{"prompt": [{"role": "user", "content": "a", "content": "b"}]}', "row 0: .* 'content' twice"),
        ("deep.jsonl", '{"extra_info": ' * 100_000, "row 0: not valid JSON: .* recursion"),
        ("list.jsonl", "[1]", "row 0: expected an object"),
        ("half.jsonl", '{"extra_info": {"note": ["\\ud83d\\ude00", "\\uD83D"]}}', r"row 0: holds half .* '.ud83d'"),
        ("empty.jsonl", "\n", "has no rows"),
        ("bad.parquet", "x", "cannot read"),
        ("d.csv", "x", "unknown form"),
    ]:
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=words):
            open_file(tmp_path / name)
