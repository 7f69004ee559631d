"""Rows of tables are the rows that were written: no field of another row comes in as a null."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollmesh.mesh.rows.arrow_rows import rows_of
from rollmesh.reward_service.samples import read_rows
from tests.learner.data.conftest import open_file, record, write_jsonl


def through_arrow(values: list[Any], kind: pa.DataType | None = None) -> list[Any]:
    return [row["column"] for row in rows_of(pa.table({"column": pa.array(values, type=kind)}))]


@pytest.mark.parametrize(
    "values",
    [
        [{"a": 1}, {"b": "x"}, {"a": 2, "b": "y"}],
        [{"outer": {"a": 1}}, {"outer": {"b": [{"c": 1}, {"d": 2}]}}, {"other": 3}],
        [[{"a": 1}, {"b": 2}], [], None],
        [[[{"a": 1}], [{"b": 2}]]],
        [{"list": [1, None, 2]}, {"text": "x"}],
        [None, {"a": 1}],
        [[None, {"a": 1}, {"b": 2}]],
        ["text", None],
        [[1, None]],
    ],
)
def test_only_fields_of_the_row_remain(values: list[Any]) -> None:
    assert through_arrow(values) == values


def test_a_struct_without_any_of_its_fields_is_empty() -> None:
    assert through_arrow([{"f": {"a": 1}}, {"f": {}}]) == [{"f": {"a": 1}}, {"f": {}}]


def test_maps_are_objects_with_their_own_nulls() -> None:
    kind = pa.map_(pa.string(), pa.struct([("a", pa.int64()), ("b", pa.int64())]))
    assert through_arrow([[("x", {"a": 1}), ("y", None)], None], kind) == [{"x": {"a": 1}, "y": None}, None]


@pytest.mark.parametrize("kind", [pa.large_list, lambda each: pa.list_(each, 2)])
def test_every_kind_of_list_is_looked_into(kind: Any) -> None:
    each = pa.struct([("a", pa.int64()), ("b", pa.int64())])
    assert through_arrow([[{"a": 1}, {"b": 2}]], kind(each)) == [[{"a": 1}, {"b": 2}]]


ROWS = [
    record(0, reward_model={"ground_truth": {"schema": {"type": "object"}}}, extra_info={"choices": {"A": "x"}}),
    record(1, reward_model={"ground_truth": {"least": 3}}, extra_info={"choices": {"B": "y", "C": "z"}}),
]


def test_truths_and_further_fields_are_the_same_from_both_kinds_of_files(tmp_path: Path) -> None:
    table = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), table)
    for path in (write_jsonl(tmp_path / "rows.jsonl", ROWS), table):
        read = open_file(path).rows([0, 1])
        assert [row.ground_truth for row in read] == [row["reward_model"]["ground_truth"] for row in ROWS]
        assert [row.extra_info for row in read] == [row["extra_info"] for row in ROWS]
        tried = list(read_rows(path))
        assert [row.ground_truth for row in tried] == [row["reward_model"]["ground_truth"] for row in ROWS]
        assert [row.extra_info for row in tried] == [row["extra_info"] for row in ROWS]


def test_a_null_that_an_author_wrote_stays(tmp_path: Path) -> None:
    told = {"default": None, "choices": [None, {"a": None}]}
    rows = [record(0, extra_info=told, reward_model={"ground_truth": json.loads('{"a": null}')})]
    [row] = open_file(write_jsonl(tmp_path / "rows.jsonl", rows)).rows([0])
    assert (row.extra_info, row.ground_truth) == (told, {"a": None})
