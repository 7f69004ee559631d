"""The trackers that a configuration asks for: whether their packages are there, and how they are opened."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable

from rollmesh.learner.metrics.files import METRICS
from rollmesh.learner.metrics.trackers.background import OPEN_S, BackgroundTracker
from rollmesh.learner.metrics.trackers.interface import Tracker
from rollmesh.learner.metrics.trackers.local import ConsoleTracker, JsonlTracker
from rollmesh.learner.recovery.run_id import take_run_id
from rollmesh.mesh.config import Config
from rollmesh.mesh.config.trainers.configs import TrainerConfig
from rollmesh.mesh.errors import ConfigError

# Key below `logging`, which is the name of the package and of its extra too, and the service's name for people.
_NAMES = {"tensorboard": "TensorBoard", "wandb": "W&B", "mlflow": "MLflow", "trackio": "trackio"}


def check_trackers(config: Config | TrainerConfig) -> None:
    """Refuses trackers whose package is missing; imports none.

    Raises:
        ConfigError: names the key, and the extra that has the package.
    """
    for key in _NAMES:
        if getattr(config.logging, key) and importlib.util.find_spec(key) is None:
            raise ConfigError(
                f"logging.{key} is on, but {key} is not installed in the learner's environment",
                hint=f"pip install 'rollmesh[{key}]'",
            )


def open_trackers(config: Config | TrainerConfig) -> list[Tracker]:
    """The trackers that the configuration asks for; `metrics.jsonl` is always the first.

    Raises:
        ConfigError: a tracker is not installed, or refuses its settings or the user's key.
    """
    check_trackers(config)
    folder = config.run.folder
    background = [
        BackgroundTracker(_NAMES[key], opened)
        for key, opened in _services(config).items()
        if getattr(config.logging, key)
    ]
    until = time.monotonic() + OPEN_S
    for tracker in background:
        tracker.wait_open(max(0.0, until - time.monotonic()))
    return [JsonlTracker(folder / METRICS), ConsoleTracker(config.logging.console_every_steps), *background]


def _services(config: Config | TrainerConfig) -> dict[str, Callable[[], Tracker]]:
    """The opening of each tracker, by its key."""
    logging, run = config.logging, config.run
    run_id = take_run_id(run.folder, run.name)
    shown = config.model_dump(mode="json")

    def tensorboard() -> Tracker:
        from rollmesh.learner.metrics.trackers.tensorboard import TensorBoardTracker

        return TensorBoardTracker(run.folder / "tensorboard")

    def wandb() -> Tracker:
        from rollmesh.learner.metrics.trackers.wandb import WandbTracker

        return WandbTracker(run.folder, project=logging.project, name=run.name, run_id=run_id, config=shown)

    def mlflow() -> Tracker:
        from rollmesh.learner.metrics.trackers.mlflow import MlflowTracker, local_store

        uri = logging.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI") or local_store(run.dir / "mlruns")
        return MlflowTracker(uri, logging.project, name=run.name, run_id=run_id, config=shown)

    def trackio() -> Tracker:
        from rollmesh.learner.metrics.trackers.trackio import TrackioTracker

        return TrackioTracker(run.dir / "trackio", project=logging.project, run_id=run_id, config=shown)

    return {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow, "trackio": trackio}
