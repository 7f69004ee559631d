"""The ways in which generators and learner give memory back to each other on shared devices: pure decisions."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rollmesh.mesh.config.models import Config

Release = Literal["memory", "process"]
REST_KEY = "placement.rest_dir"
"""The key of the folder in which a learner rests on a CPU."""
REST_NAME = "resting"
"""Name of the folder in a run's own for what rests."""


def release_of(config: Config, *, on_cpu: bool) -> Release:
    """The way in which a sleeping engine of a run gives memory back.

    Args:
        config: of the run.
        on_cpu: the engine computes on a CPU, where those with processes of their own free nothing while they sleep.
    """
    if not config.rollout.owns_processes:
        return "memory"
    if config.placement.release != "auto":
        return config.placement.release
    return "process" if on_cpu else "memory"


def rest_folder(config: Config, *, on_cpu: bool) -> Path | None:
    """The folder for the learner's state while it rests; None where it rests in memory.

    Args:
        config: of the run.
        on_cpu: the learner computes on a CPU.
    """
    if not config.placement.learner_takes_turns or not on_cpu:
        return None
    return config.placement.rest_dir or config.run.folder / REST_NAME
