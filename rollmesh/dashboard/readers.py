"""The reader of a folder, by what is in it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from rollmesh.dashboard.evaluation_reader import RESULT, EvaluationReader
from rollmesh.dashboard.run_reader import RunReader
from rollmesh.dashboard.run_view import RunView


class Reader(Protocol):
    """Follows a folder."""

    @property
    def view(self) -> RunView:
        """The run as it was read last."""

    def refresh(self) -> None:
        """Reads what is new."""


def open_reader(folder: Path, *, ended: bool = False) -> Reader:
    """The reader of a run, of a training on data, or of an evaluation.

    Args:
        folder: to read.
        ended: see `RunReader`.

    Raises:
        DataError: it is the folder of none of these.
    """
    return EvaluationReader(folder) if (folder / RESULT).exists() else RunReader(folder, ended=ended)
