"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollmesh.learner.metrics.trackers.interface import Record, Sample, Tracker, numbers
from rollmesh.learner.metrics.trackers.sample_table import COLUMNS, TABLE, rows
from rollmesh.mesh.errors import ConfigError


class WandbTracker(Tracker):
    """A run of Weights & Biases; `WANDB_MODE=offline` keeps everything in the run folder.

    Args:
        folder: of the run.
        project: of W&B.
        name: of the run, for people.
        run_id: of the run; one that exists is continued.
        config: shown with the run.

    Raises:
        ConfigError: wandb refuses the key or the settings.
        wandb.Error: its server does not answer.
    """

    def __init__(self, folder: Path, *, project: str, name: str, run_id: str, config: Mapping[str, Any]) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project=project,
                name=name,
                id=run_id,
                resume="allow",
                dir=str(folder),
                config=dict(config),
                settings=wandb.Settings(console="off", silent=True),
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as error:
            raise ConfigError(f"wandb did not start: {error}", hint="log in, or set WANDB_MODE=offline") from error
        # Two records may belong to one step (training and evaluation): the step is an axis, not wandb's own counter.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, record: Record) -> None:
        self._run.log({"step": step, **numbers(record)})

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        import wandb

        table = wandb.Table(columns=list(COLUMNS), data=rows(samples), allow_mixed_types=True)
        self._run.log({"step": step, TABLE: table})

    def close(self) -> None:
        import wandb

        self._run.finish()
        # Waits for wandb's own process, which may still be writing; this is the only run of the learner's process.
        wandb.teardown()
