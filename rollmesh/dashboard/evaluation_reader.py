"""An evaluation of `rollmesh eval` as the page shows it, read from its folder."""

from __future__ import annotations

import json
from pathlib import Path

from rollmesh.dashboard.run_view import EVALUATION, RunView
from rollmesh.mesh.errors import DataError

RESULT = "evaluation.json"


class EvaluationReader:
    """Reads the folder of an evaluation; its result is written when it has ended.

    Args:
        folder: of the evaluation.

    Raises:
        DataError: its result cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / RESULT
        self.view = RunView(folder.name, folder, EVALUATION)
        self.refresh()

    def refresh(self) -> None:
        """Reads the result.

        Raises:
            DataError: it cannot be read.
        """
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
            self.view.evaluation, self.view.name = found, str(found["name"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self._path} cannot be read: {error}") from error
