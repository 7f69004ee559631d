"""Parquet datasets through pyarrow: only the needed columns are held, as Arrow columns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rollmesh.learner.data.rows import Row, parse_row
from rollmesh.mesh.errors import DataError


class ParquetRows:
    """Rows of one Parquet file.

    Raises:
        DataError: unreadable file, or a needed field that is missing or null (row and field named).
    """

    def __init__(self, path: Path, prompt_key: str) -> None:
        self._path = path
        self._prompt_key = prompt_key
        try:
            file = pq.ParquetFile(path)
            present = set(file.schema_arrow.names)
            for column in (prompt_key, "data_source", "reward_model"):
                if column not in present and file.metadata.num_rows:
                    # The row parser words the error; row 0 is the first that lacks the column.
                    parse_row(path, 0, _first_record(file), prompt_key)
            columns = [n for n in (prompt_key, "data_source", "reward_model", "extra_info", "images") if n in present]
            self._table = file.read(columns=columns)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"cannot read {path}: {error}", hint="is it a Parquet file?") from error
        self._check_nulls()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def rows(self, indices: Sequence[int]) -> list[Row]:
        records = self._table.take(pa.array(indices, type=pa.int64())).to_pylist()
        return [
            parse_row(self._path, index, record, self._prompt_key)
            for index, record in zip(indices, records, strict=True)
        ]

    def _check_nulls(self) -> None:
        """Every row that could fail in `rows` for lack of a field fails here; types are those of row 0."""
        if len(self) == 0:
            return
        self.rows([0])
        columns = {name: self._table[name] for name in (self._prompt_key, "data_source", "reward_model")}
        columns["reward_model.ground_truth"] = self._table.select(["reward_model"]).flatten()[
            "reward_model.ground_truth"
        ]
        for column in columns.values():
            if column.null_count:
                first = column.is_null().index(True).as_py()
                self.rows([first])


def _first_record(file: pq.ParquetFile) -> dict[str, object]:
    record: dict[str, object] = next(file.iter_batches(batch_size=1)).to_pylist()[0]
    return record
