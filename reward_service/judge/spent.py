"""The use of the judges of a run, in files of its folder: a budget outlives the processes that spend it.

There is one file for each process, which alone writes it, each second. If a process is killed, its use since then is
not known.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rollmesh.mesh.private_files import private_folder

log = logging.getLogger(__name__)
FOLDER = "judge"
"""Below the folder of the run."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Tokens, and their cost."""

    tokens: float = 0.0
    cost: float = 0.0

    def at_least(self, other: Spent) -> Spent:
        """The greater of both, in each."""
        return Spent(max(self.tokens, other.tokens), max(self.cost, other.cost))


def read_spent(run: Path) -> dict[str, Spent]:
    """The use of each process that has ever scored for a run, by its member id; what cannot be read is left out."""
    found = {}
    for path in sorted((run / FOLDER).glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            found[path.stem] = Spent(float(content["tokens"]), float(content["cost"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is not counted in the budget of the judge: %s", path, error)
    return found


class SpentFiles:
    """The files of a run, and this process's own one.

    Args:
        run: its folder; one that is not on this host keeps nothing.
        member_id: of this process.
    """

    def __init__(self, run: Path, member_id: str) -> None:
        self._run = run
        self._path = run / FOLDER / f"{member_id}.json"
        self._written = Spent()

    def others(self) -> Mapping[str, Spent]:
        """The use of all other processes, by member id."""
        found = read_spent(self._run)
        found.pop(self._path.stem, None)
        return found

    def write(self, spent: Spent) -> None:
        """Writes the use of this process, where it has changed; a disk that refuses is told in the log."""
        if spent == self._written or not self._run.is_dir():
            return
        new = self._path.with_suffix(".new")
        try:
            private_folder(self._path.parent)
            new.write_text(json.dumps({"tokens": spent.tokens, "cost": spent.cost}), encoding="utf-8")
            os.replace(new, self._path)
            self._written = spent
        except OSError as error:
            log.warning("the use of the judge is not kept: %s", error)
