"""trackio, which keeps its curves in a local database or on a Hugging Face Space."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollmesh.learner.metrics.trackers.interface import Record, Sample, Tracker, numbers
from rollmesh.learner.metrics.trackers.sample_table import COLUMNS, TABLE, rows

# Names that trackio keeps for itself.
_RESERVED = frozenset({"project", "run", "step", "time", "timestamp", "metrics"})


class TrackioTracker(Tracker):
    """A run of trackio.

    Args:
        folder: of the database, unless `TRACKIO_DIR` names another; runs share it.
        project: of trackio.
        run_id: name of the run; one that exists is continued.
        config: shown with the run.
    """

    def __init__(self, folder: Path, *, project: str, run_id: str, config: Mapping[str, Any]) -> None:
        # Read when the package is imported.
        os.environ.setdefault("TRACKIO_DIR", str(folder.absolute()))
        import trackio

        self._run = trackio.init(
            project,
            name=run_id,
            config=dict(config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, record: Record) -> None:
        self._run.log({name: value for name, value in numbers(record).items() if name not in _RESERVED}, step=step)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        import trackio

        self._run.log({TABLE: trackio.Table(columns=list(COLUMNS), data=rows(samples))}, step=step)

    def close(self) -> None:
        self._run.finish()
