"""A run as the page shows it, at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rollmesh.dashboard.curves.columns import RecordColumns
from rollmesh.dashboard.live import LiveMesh
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.trainers.configs import TrainerConfig
from rollmesh.report.summary import Summary
from rollmesh.report.unscored import UnscoredMembers
from rollmesh.run_files import RUN
from rollmesh.training.summary import TrainingSummary

EVALUATION = "eval"
"""The command `rollmesh eval`."""
_UNSCORED = "unscored/"
# Seconds over which a speed is that of now.
_SPEED_S = 30.0


@dataclass
class RunView:
    """A run at one moment.

    Attributes:
        name: of the run.
        folder: of the run; None where only its mesh is known.
        command: `run`, `sft`, `rm`, `dpo` or `eval`.
        config: with which it was last taken over; None where only its mesh is known.
        steps, evaluations: records of the training, and of evaluations, on the surviving lineage.
        snapshots: of the mesh, about every second.
        summary: of a run that has ended; None in progress, and where none was left.
        in_progress: a launcher works in its folder, or its mesh answers.
        mesh: the mesh now; None where it was not asked.
        evaluation: result of `rollmesh eval`, as its file has it; None of anything else.
    """

    name: str
    folder: Path | None = None
    command: str = RUN
    config: Config | TrainerConfig | None = None
    steps: RecordColumns = field(default_factory=RecordColumns)
    evaluations: RecordColumns = field(default_factory=RecordColumns)
    snapshots: RecordColumns = field(default_factory=RecordColumns)
    summary: Summary | TrainingSummary | None = None
    in_progress: bool = False
    mesh: LiveMesh | None = None
    evaluation: Mapping[str, Any] | None = None

    @property
    def run_config(self) -> Config | None:
        """The configuration of `rollmesh run`; None for trainings on data."""
        return self.config if isinstance(self.config, Config) else None

    @property
    def run_summary(self) -> Summary | None:
        """The summary of `rollmesh run`; None for trainings on data."""
        return self.summary if isinstance(self.summary, Summary) else None

    @property
    def start(self) -> float:
        """Unix time in seconds of the first version, or of the first record; 0 before there is one."""
        for columns in (self.steps, self.evaluations):
            if len(columns) and not np.isnan(time := columns.column("time")[0]):
                waited = columns.column("wall_s")[0]
                return float(time) - (0.0 if np.isnan(waited) else float(waited))
        return float(self.snapshots.column("time")[0]) if len(self.snapshots) else 0.0

    @property
    def unscored(self) -> UnscoredMembers:
        """Members of trained groups without a reward."""
        codes = {
            name.removeprefix(_UNSCORED): int(self.steps.total(name))
            for name in self.steps.names()
            if name.startswith(_UNSCORED)
        }
        found = UnscoredMembers(cause=self.steps.text("unscored_cause"))
        found.codes.update({code: count for code, count in codes.items() if count})
        found.members = int(self.steps.total("samples")) + found.codes.total()
        return found

    def first_last(self, metric: str) -> tuple[float | None, float | None]:
        """The first and the last value of an evaluation's metric, by step; None where it has none."""
        values, steps = self.evaluations.column(metric), self.evaluations.column("step")
        known = values[np.argsort(steps, kind="stable")]
        known = known[~np.isnan(known)]
        return (float(known[0]), float(known[-1])) if len(known) else (None, None)

    def tokens_per_s(self) -> tuple[float | None, float | None]:
        """Tokens generated and trained per second: of now in progress, else of the whole run; None where not known."""
        if (summary := self.run_summary) is not None:
            return summary.tokens_per_s_generated, summary.tokens_per_s_trained
        return (_recent_rate(self.snapshots, "generated_tokens"), _recent_rate(self.steps, "total/tokens"))

    def steps_per_s(self) -> float:
        """Steps per second over the last seconds; 0 where not known."""
        return _recent_rate(self.steps, "step") or 0.0


def _recent_rate(columns: RecordColumns, total: str) -> float | None:
    """Growth of a total per second over the last seconds."""
    time, totals = columns.column("time"), columns.column(total)
    known = ~np.isnan(totals)
    time, totals = time[known], totals[known]
    if len(time) < 2:
        return None
    before = min(int(np.searchsorted(time, time[-1] - _SPEED_S)), len(time) - 2)
    elapsed = float(time[-1] - time[before])
    return max(0.0, float(totals[-1] - totals[before])) / elapsed if elapsed > 0 else None
