"""A run as the page shows it, read from its folder, and followed as it grows.

Invariant: records that were read are not read again: each look costs as much as was written since.
"""

from __future__ import annotations

from pathlib import Path

from rollmesh.dashboard.curves.lineage import Lineage
from rollmesh.dashboard.run_view import RunView
from rollmesh.learner.metrics.files import METRICS
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import DataError
from rollmesh.report.metrics import MetricsTail
from rollmesh.report.summary import FinalState, Summary, build_summary, read_summary
from rollmesh.run_files import RUN, SNAPSHOTS, SUMMARY, is_in_use, read_any_config, trained_by
from rollmesh.training.state import training_state
from rollmesh.training.summary import TrainingSummary


class RunReader:
    """Reads a run folder, and what was added to it since.

    Args:
        folder: of the run.
        ended: it has, although the command that ran it still holds the folder.

    Raises:
        DataError: it is not that of a run.
    """

    def __init__(self, folder: Path, *, ended: bool = False) -> None:
        self._folder = folder
        self._ended = ended
        # State of the folder of which the summary is known.
        self._summary_of: tuple[bool, int, int] | None = None
        self.view = self._begin()
        self.refresh()

    def refresh(self) -> None:
        """Reads what is new, or everything where the run has started over.

        Raises:
            DataError: the folder is not that of a run any more.
        """
        if _identity(self._folder) != self._read_from:
            self.view, self._summary_of = self._begin(), None
        view = self.view
        for record in self._metrics.read():
            self._lineage.add(record)
        for record in self._snapshots.read():
            view.snapshots.append(record)
        view.in_progress = not self._ended and is_in_use(self._folder)
        state = (view.in_progress, len(view.steps), _changed(self._folder / SUMMARY))
        if state != self._summary_of:
            self._summary_of = state
            view.summary = None if view.in_progress else self._summary()

    def _begin(self) -> RunView:
        """A view without records: `--fresh` puts a new folder in the place of the old one."""
        command, config = trained_by(self._folder), read_any_config(self._folder)
        self._read_from = _identity(self._folder)
        self._metrics = MetricsTail(self._folder / METRICS)
        self._snapshots = MetricsTail(self._folder / SNAPSHOTS)
        self._lineage = Lineage(of_training=command is not None)
        return RunView(
            config.run.name, self._folder, command or RUN, config, self._lineage.steps, self._lineage.evaluations
        )

    def _summary(self) -> Summary | TrainingSummary | None:
        """The summary of a run that has ended; one that was killed has left none, or that of the launch before."""
        config = self.view.config
        if not isinstance(config, Config):
            return training_state(self._folder)
        try:
            found = read_summary(self._folder)
        except DataError:
            found = None
        if found is not None and found.steps == int(self.view.steps.last("step") or 0):
            return found
        return build_summary(self._folder, config, FinalState(ended="killed"))


def _changed(path: Path) -> int:
    """The time of a file's last change, 0 without one."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _identity(folder: Path) -> tuple[int, int]:
    """Tells a folder from another one of the same name."""
    try:
        found = folder.stat()
    except OSError:
        return (0, 0)
    return (found.st_dev, found.st_ino)
