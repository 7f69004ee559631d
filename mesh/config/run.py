"""The configuration of a run as a whole: its name and seed, its logs, its use of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from rollmesh.mesh.config.base import PositiveInt, Section


class RunSection(Section):
    name: str = Field(
        "run", pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$", description="Name of the run; also its folder below `dir`."
    )
    dir: Path = Field(Path("runs"), description="Folder that holds run folders.")
    seed: int = Field(0, ge=0, description="Seed of data order, sampling and initialization.")

    @property
    def folder(self) -> Path:
        """Folder of this run: configuration, metrics, samples, checkpoints, report."""
        return self.dir / self.name


class TrackingSection(Section):
    """Logs and trackers of anything that trains."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Level of the services' logs.")
    format: Literal["auto", "json", "text"] = Field(
        "auto", description="Form of the services' log lines; `auto`: text at a terminal, else JSON."
    )
    console_every_steps: PositiveInt = Field(10, description="Steps between plain log lines without a terminal.")
    tensorboard: bool = Field(False, description="Write TensorBoard events into the run folder.")
    wandb: bool = Field(False, description="Log to Weights & Biases (WANDB_MODE=offline works).")
    mlflow: bool = Field(False, description="Log to MLflow.")
    mlflow_uri: str | None = Field(
        None,
        min_length=1,
        description="MLflow server or store; none: MLFLOW_TRACKING_URI, else the folder `mlruns` in `run.dir`.",
    )
    trackio: bool = Field(
        False,
        description="Log to trackio: to a Space that TRACKIO_SPACE_ID names, else to TRACKIO_DIR, else to the folder "
        "`trackio` in `run.dir`.",
    )
    project: str = Field("rollmesh", min_length=1, description="Project in W&B and trackio, and experiment in MLflow.")
    callbacks: list[str] = Field(
        default_factory=list,
        description="Classes of callbacks, `file.py:Class` or `module:Class`, which the learner calls at events of the "
        "run. See docs/tracking.md.",
    )
    callback_errors: Literal["stop", "log"] = Field(
        "stop", description="A callback that raises or hangs ends the run, with a checkpoint, or is only logged."
    )
    callback_timeout_s: float = Field(
        600.0, gt=0.0, description="Longest call of a callback; one that lasts longer hangs."
    )


class LoggingSection(TrackingSection):
    tables_every_steps: int = Field(
        0,
        ge=0,
        description="Steps between tables of kept samples in the trackers; 0: samples stay in the run folder.",
    )
    record: bool = Field(
        False, description="Keep every claimed batch with its payloads in RUN/recording, for `rollmesh replay`."
    )
    record_max_bytes: PositiveInt = Field(
        4 << 30, description="Bytes of the recording; the oldest batches are deleted beyond."
    )
    dashboard_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of loopback at which `rollmesh run` serves the page of the run; 0: a free one; none: no "
        "page. `rollmesh dashboard RUN` serves it too. See dashboard.md.",
    )
    samples_per_step: int = Field(4, ge=0, description="Trained samples kept per step.")
    tokens_per_sample: int = Field(
        4096,
        ge=0,
        description="Tokens of a kept sample, from its first on, that are kept with their values (log-probs, "
        "advantage, ...); about 25 bytes each. 0: the text alone. See tracking.md.",
    )


class ResourcesSection(Section):
    learner_threads: PositiveInt | None = Field(None, description="Compute threads of a learner rank; none: derived.")
    generator_threads: PositiveInt | None = Field(None, description="Compute threads of a generator; none: derived.")
    max_restarts: int = Field(
        5,
        ge=0,
        description="Restarts of one service before the run ends: within ten minutes of one that ends, and within a "
        "day of one that hangs.",
    )
    frozen_after_s: float = Field(
        20.0,
        ge=0.0,
        description="`rollmesh run` kills and restarts a service that does not answer its health check, and "
        "the embedded Redis. A service that a signal has stopped gets this many seconds, T. One "
        "that runs gets T of processor time, and one that sleeps 3 T. A service that only waits "
        "for a processor is never killed. A generator ends itself if its engine does not answer: "
        "after T stopped, 30 T of processor time, or 9 T asleep. A learner that hangs in a step "
        "ends itself too; its first step may take `buffer.stall_limit_s`. 0: never.",
    )
