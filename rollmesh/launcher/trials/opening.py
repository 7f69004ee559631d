"""The placement in which a run of `placement: auto` begins: the one that it has chosen before, else in turns."""

from __future__ import annotations

import os

from rollmesh.launcher.placement.nvidia_smi import device_names
from rollmesh.launcher.placement.visible import VARIABLE, has_driver
from rollmesh.launcher.trials.candidates import IN_TURNS, in_placement
from rollmesh.launcher.trials.measuring import least_batches
from rollmesh.launcher.trials.record import PlacementRecord, digest_of, read_record
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.runtime.threads import available_cores
from rollmesh.report.metrics import is_training, run_records


def opening(asked: Config, *, fresh: bool = False) -> Config:
    """The configuration in which a run begins; as it is without `placement: auto`.

    Args:
        asked: as the user gave it.
        fresh: the run starts over, whatever is in its folder.
    """
    if asked.placement.mode != "auto":
        return asked
    kept = None if fresh else chosen_before(asked)
    return in_placement(asked, {"placement.mode": IN_TURNS} if kept is None else kept.settings)


def chosen_before(asked: Config) -> PlacementRecord | None:
    """The choice of an earlier launch, if it holds for this configuration and this machine."""
    record = read_record(asked.run.folder)
    if record is None or not record.decided or record.valid_for != digest_here(asked):
        return None
    prolonged = record.untried and asked.learner.steps > record.steps
    return None if prolonged and steps_left(asked) >= sum(least_batches(asked)) else record


def steps_left(asked: Config) -> int:
    """Steps of the run that are not trained yet."""
    trained = (int(record["step"]) for record in run_records(asked.run.folder) if is_training(record))
    return asked.learner.steps - max(trained, default=0)


def digest_here(asked: Config) -> str:
    """A digest of the configuration and of this machine."""
    return digest_of(asked, available_cores(), _devices())


def _devices() -> list[str]:
    """CUDA devices as the driver lists them, and those that are visible."""
    names = device_names() if has_driver() else []
    return [*names, os.environ.get(VARIABLE, "")] if names else []
