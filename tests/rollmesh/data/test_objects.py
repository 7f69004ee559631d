"""Rows of a program's own become a file that a run can name, and find again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import rollmesh
from rollmesh.data.objects import write_rows
from rollmesh.learner.data.dataset import open_source
from rollmesh.learner.data.rows import Row
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.errors import ConfigError, DataError
from tests.learner.data.conftest import record


class Dataset:
    """As the library's: it writes itself."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self._rows = rows

    def to_parquet(self, path: str) -> None:
        pq.write_table(pa.Table.from_pylist(self._rows), path)


def read(path: Path) -> list[Row]:
    source = open_source(DataSource(path=str(path)))
    return source.rows(range(len(source)))


@pytest.mark.parametrize("kind", [list, iter, Dataset])
def test_rows_are_written_once_under_a_name_of_their_content(tmp_path: Path, kind: Any) -> None:
    rows = [record(i) for i in range(3)]
    first, again = (write_rows(kind(rows), tmp_path / "rows", "train") for _ in range(2))
    assert first == again
    assert list((tmp_path / "rows").iterdir()) == [first], "nothing half written stays"
    assert [row.ground_truth for row in read(first)] == ["1", "2", "3"]
    assert write_rows(kind(rows[:2]), tmp_path / "rows", "train") != first
    assert (tmp_path / "rows").stat().st_mode & 0o077 == 0


def test_values_that_json_lacks_are_written_plainly(tmp_path: Path) -> None:
    image = b"\x89PNG\r\n\x1a\n"
    rows = [{"prompt": "<image>?", "answer": np.int64(7), "images": [image], "scores": np.arange(2.0)}]
    [row] = read(write_rows(rows, tmp_path, "train"))
    assert (row.ground_truth, row.images, row.extra_info["scores"]) == (7, (image,), [0.0, 1.0])


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"train": [record(0)]}, "eval: dict is no list of rows"),
        (3, "eval: int is no list of rows"),
        (["a"], "eval, row 0: expected a dict, got str"),
        ([record(0), {"prompt": object()}], "eval, row 1: object cannot be written"),
    ],
)
def test_objects_without_rows_are_named(tmp_path: Path, rows: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        write_rows(rows, tmp_path, "eval")
    assert list(tmp_path.iterdir()) == []


def test_train_takes_rows_in_place_of_the_configuration(tmp_path: Path) -> None:
    config = {"run": {"dir": str(tmp_path)}, "model": {"path": "/absent/model"}}
    with pytest.raises(DataError, match=r"model\.path: no such folder"):
        rollmesh.train(config, train=[record(0)], eval=[record(1)], quiet=True)
    assert len(list((tmp_path / "rows").iterdir())) == 2
