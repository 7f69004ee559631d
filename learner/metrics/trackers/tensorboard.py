"""TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rollmesh.learner.metrics.trackers.interface import Record, Sample, Tracker, numbers
from rollmesh.learner.metrics.trackers.sample_table import TABLE, as_markdown


class TensorBoardTracker(Tracker):
    """Event files for TensorBoard; samples are a table in its text view.

    Args:
        folder: of the files, which the run's earlier learners have begun.
    """

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder))

    def log(self, step: int, record: Record) -> None:
        for name, value in numbers(record).items():
            self._writer.add_scalar(name, value, step)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        self._writer.add_text(TABLE, as_markdown(samples), step)

    def close(self) -> None:
        self._writer.close()
