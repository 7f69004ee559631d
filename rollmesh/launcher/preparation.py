"""Results of the checks before a run: its devices, notices, and a process that has loaded the learner's code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollmesh.launcher.placement.devices import DevicePlan
from rollmesh.launcher.service_process import LoadedProcess


@dataclass(frozen=True, slots=True)
class Preparation:
    """Everything that the checks leave for the run.

    Attributes:
        devices: of learner and generators.
        notices: about valid settings, a sentence each.
        learner: becomes the first process of the learner; None: that one is started like its successors.
    """

    devices: DevicePlan
    notices: Sequence[str] = ()
    learner: LoadedProcess | None = None
