"""The trackers that a configuration asks for: whether their packages are there, and how they are opened."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

from rollmesh.learner.metrics.trackers.background import BackgroundTracker
from rollmesh.learner.metrics.trackers.interface import Tracker
from rollmesh.learner.metrics.trackers.local import ConsoleTracker, JsonlTracker
from rollmesh.learner.recovery.run_id import take_run_id
from rollmesh.mesh.config import Config
from rollmesh.mesh.config.trainers.configs import TrainerConfig
from rollmesh.mesh.errors import ConfigError

# Key below `logging` -> the package that it needs.
_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}


def check_trackers(config: Config | TrainerConfig) -> None:
    """Refuses trackers whose package is missing; imports none.

    Raises:
        ConfigError: names the key, and the extra that has the package.
    """
    for key, package in _PACKAGES.items():
        if getattr(config.logging, key) and importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"logging.{key} is on, but {package} is not installed in the learner's environment",
                hint=f"pip install 'rollmesh[{key}]'",
            )


def open_trackers(config: Config | TrainerConfig) -> list[Tracker]:
    """The trackers that the configuration asks for; `metrics.jsonl` is always the first.

    Raises:
        ConfigError: a tracker is not installed, or refuses its settings or the user's key.
    """
    check_trackers(config)
    folder = config.run.folder
    background = [BackgroundTracker(name, opened) for name, opened in _services(config).items()]
    for tracker in background:
        tracker.wait_open()
    return [JsonlTracker(folder / "metrics.jsonl"), ConsoleTracker(config.logging.console_every_steps), *background]


def _services(config: Config | TrainerConfig) -> dict[str, Callable[[], Tracker]]:
    """The opening of each tracker that is on, by the service's name."""
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

    services = {"TensorBoard": tensorboard, "W&B": wandb, "MLflow": mlflow, "trackio": trackio}
    return {name: services[name] for key, name in zip(_PACKAGES, services, strict=True) if getattr(logging, key)}
