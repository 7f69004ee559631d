"""Trackers: the destinations of a run's records.

A record is flat: metric name -> value, names with slashes (`critic/score/mean`). Values that are no numbers
(histograms as maps, texts) are kept by the jsonl file and left out by trackers that draw curves.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from rollmesh.mesh.config import Config
from rollmesh.mesh.config.trainers.configs import TrainerConfig
from rollmesh.mesh.errors import ConfigError

log = logging.getLogger(__name__)

Record = Mapping[str, Any]


class Tracker(Protocol):
    """Takes records; called from the writer's thread only."""

    def log(self, step: int, record: Record) -> None:
        """Takes one record.

        Args:
            step: optimizer batches trained when it was made; not decreasing, may repeat.
            record: metric name -> value.
        """
        ...

    def close(self) -> None:
        """Flushes and releases everything."""
        ...


class JsonlTracker:
    """One JSON object per record, complete lines only; appended to the file of the run's earlier learners."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if torn:  # the last writer was killed in the middle of a line
            self._file.write("\n")

    def log(self, step: int, record: Record) -> None:
        self._file.write(json.dumps({"step": step, **_finite(record)}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class ConsoleTracker:
    """A plain log line at a fixed interval of steps, and one for each evaluation."""

    def __init__(self, every_steps: int) -> None:
        self._every = every_steps

    def log(self, step: int, record: Record) -> None:
        if "eval/reward" in record:
            log.info("step %d: held-out reward %.3f", step, record["eval/reward"])
        elif "critic/score/mean" in record and (step % self._every == 0 or step == 1):
            log.info(
                "step %d: reward %.3f, response length %.1f, staleness %.2f, %.0f tokens/s, waited %.0f of %.0f ms",
                step,
                record["critic/score/mean"],
                record["response_length/mean"],
                record["staleness/mean"],
                record["tokens_per_second"],
                1e3 * record["timing_s/gen"],
                1e3 * record["timing_s/step"],
            )
        elif "steps" in record and (step % self._every == 0 or step in (1, record["steps"])):
            loss, rate = record.get("actor/loss", math.nan), record.get("actor/lr", math.nan)
            speed = record["perf/throughput"]
            log.info("step %d of %d: loss %.4f, lr %.2e, %.0f tokens/s", step, record["steps"], loss, rate, speed)
        if "eval/loss" in record:
            log.info("step %d: held-out loss %.4f", step, record["eval/loss"])

    def close(self) -> None:
        """Does nothing: the console stays open."""


class TensorBoardTracker:
    """Event files for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(log_dir=str(folder))

    def log(self, step: int, record: Record) -> None:
        for name, value in _numbers(record).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """Weights & Biases; `WANDB_MODE=offline` keeps everything in the run folder.

    Raises:
        ConfigError: wandb is not installed, or refuses to start.
    """

    def __init__(self, folder: Path, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                "logging.wandb is on, but wandb is not installed", hint="pip install 'rollmesh[wandb]'"
            ) from error
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                id=name,
                resume="allow",
                dir=str(folder),
                config=dict(config),
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.Error as error:
            raise ConfigError(f"wandb did not start: {error}", hint="log in, or set WANDB_MODE=offline") from error
        # Two records may belong to one step (training and evaluation): the step is an axis, not wandb's own counter.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, record: Record) -> None:
        self._run.log({"step": step, **_numbers(record)})

    def close(self) -> None:
        import wandb

        self._run.finish()
        # Waits for wandb's own process, which may still be writing; this is the only run of the learner's process.
        wandb.teardown()


def open_trackers(config: Config | TrainerConfig) -> list[Tracker]:
    """The trackers that the configuration asks for; `metrics.jsonl` is always the first.

    Raises:
        ConfigError: a tracker is not installed or refuses to start.
    """
    folder = config.run.folder
    trackers: list[Tracker] = [
        JsonlTracker(folder / "metrics.jsonl"),
        ConsoleTracker(config.logging.console_every_steps),
    ]
    if config.logging.tensorboard:
        trackers.append(TensorBoardTracker(folder / "tensorboard"))
    if config.logging.wandb:
        trackers.append(
            WandbTracker(
                folder,
                project=config.logging.wandb_project,
                name=config.run.name,
                config=config.model_dump(mode="json"),
            )
        )
    return trackers


def _numbers(record: Record) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _finite(record: Record) -> dict[str, Any]:
    """JSON has no NaN: such values become null, which every reader understands."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in record.items()
    }
