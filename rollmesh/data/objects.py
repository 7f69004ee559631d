"""Rows that a program has in memory become a file, which all services of a run can name.

Invariant: a file is called after its content. The same rows give the same file, so that a run continues with it, and
runs with the same rows share it. It lies next to the runs, so that a run that is started over keeps it.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from rollmesh.learner.recovery.run_identity import fingerprint
from rollmesh.mesh.config import Config
from rollmesh.mesh.config.inputs import DataSource
from rollmesh.mesh.config.trainers.configs import TrainerConfig
from rollmesh.mesh.errors import ConfigError, DataError
from rollmesh.mesh.private_files import private_folder


@runtime_checkable
class Dataset(Protocol):
    """A `datasets.Dataset`, as far as it is used here."""

    def to_parquet(self, path: str) -> Any:
        """Writes its rows."""
        ...


RowObjects = Dataset | Iterable[Mapping[str, Any]]
"""Rows of a dataset: the library's object, or mappings."""
ROWS = "rows"
"""Folder below `run.dir` with rows that were objects."""
AnyConfig = TypeVar("AnyConfig", Config, TrainerConfig)
_PENDING = "pending.jsonl"


def with_rows(
    read: Callable[[Sequence[str]], AnyConfig],
    overrides: Sequence[str],
    given: Mapping[str, RowObjects | Path | str | None],
) -> AnyConfig:
    """A configuration with these rows as its data.

    Args:
        read: reads it with some overrides.
        overrides: as on the command line.
        given: `train` and `eval`: a path, or rows, which are written below `run.dir`; None: as configured.

    Raises:
        ConfigError: the configuration is wrong, or an object holds no rows.
        DataError: the disk refuses.
    """
    data: dict[str, RowObjects | Path | str] = {name: rows for name, rows in given.items() if rows is not None}
    # `run.dir` is known once the configuration is read, and that is refused without `data.train`.
    config = read([*overrides, *(f"data.{name}={_PENDING}" for name in data)])
    sources = {}
    for name, rows in data.items():
        path = rows if isinstance(rows, str | Path) else write_rows(rows, config.run.dir / ROWS, name)
        sources[name] = (DataSource(path=str(path)),)
    return config.model_copy(update={"data": config.data.model_copy(update=sources)})


def write_rows(rows: RowObjects, folder: Path, name: str) -> Path:
    """Writes rows as a file of `folder`, unless it is there.

    Args:
        rows: a dataset, or rows as mappings of what JSON has, arrays of numpy, and bytes.
        folder: is made, for its user alone.
        name: of the argument, for errors.

    Raises:
        ConfigError: the object holds no rows, or a value that cannot be written.
        DataError: the disk refuses.
    """
    suffix = "parquet" if isinstance(rows, Dataset) else "jsonl"
    scratch = folder / f".{name}.{os.getpid()}.{suffix}"
    try:
        private_folder(folder)
        if isinstance(rows, Dataset):
            rows.to_parquet(str(scratch))
        else:
            _write_lines(rows, scratch, name)
        path = folder / f"{fingerprint([scratch])}.{suffix}"
        scratch.replace(path)
    except OSError as error:
        raise DataError(
            f"cannot write {folder}: {error.strerror or error}", hint="free space, or set run.dir"
        ) from error
    finally:
        scratch.unlink(missing_ok=True)
    return path


def _write_lines(rows: Iterable[Mapping[str, Any]], path: Path, name: str) -> None:
    hint = "give a datasets.Dataset (one split), or a list of dicts"
    if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
        raise ConfigError(f"{name}: {type(rows).__name__} is no list of rows", hint=hint)
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise ConfigError(f"{name}, row {number}: expected a dict, got {type(row).__name__}", hint=hint)
            try:
                file.write(json.dumps(dict(row), ensure_ascii=False, default=_plain) + "\n")
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"{name}, row {number}: {error}", hint="images are given as bytes or paths"
                ) from error


def _plain(value: Any) -> Any:
    """Values that JSON lacks: bytes as base64, which rows may have as images, and numbers of numpy."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
