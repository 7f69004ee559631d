"""Records of published files, one after the other: Parquet, Arrow, JSON lines, and JSON that holds one or a list."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollmesh.learner.data.json_lines import read_lines
from rollmesh.learner.data.locations import ARROW, PARQUET, data_files
from rollmesh.learner.data.tables import ArrowPieces, ParquetPieces
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.errors import DataError
from rollmesh.mesh.rows.arrow_rows import rows_of


def records(source: DataSource) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(file and number, record) of all files of a source, without a file in memory as a whole.

    Raises:
        DataError: a file cannot be read, or is not of its form.
    """
    files = _files(source)
    if files[0].suffix.lower() in (PARQUET, ARROW):
        pieces = (ArrowPieces if files[0].suffix.lower() == ARROW else ParquetPieces)(files)
        pieces.select(pieces.names)
        for number, piece in enumerate(pieces.pieces):
            for offset, row in enumerate(rows_of(pieces.read(number))):
                yield f"{piece.path}, row {piece.first + offset}", row
        return
    for path in files:
        for index, record in enumerate(_whole(path) if path.suffix.lower() == ".json" else read_lines(path)):
            yield f"{path}, row {index}", record


def _files(source: DataSource) -> list[Path]:
    """Those of a source; of a folder without data files, as MATH's with a file per problem, those in its folders."""
    folder = Path(source.path)
    if folder.is_dir() and not any(one.is_file() for one in folder.iterdir()):
        nested = sorted(folder.rglob("*.json"))
        if nested:
            return nested
    return data_files(source)


def _whole(path: Path) -> Iterator[Mapping[str, Any]]:
    """The objects of a JSON file, which holds one, a list, or one in each row."""
    try:
        values = json.loads(path.read_bytes())
    except ValueError:
        yield from read_lines(path)
        return
    for value in values if isinstance(values, list) else [values]:
        if not isinstance(value, dict):
            raise DataError(f"{path}: expected objects, got {type(value).__name__}")
        yield value
