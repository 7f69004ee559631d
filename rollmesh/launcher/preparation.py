"""Results of the checks before a run: its devices, notices, and the server that they have warmed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollmesh.launcher.placement.devices import DevicePlan
from rollmesh.mesh.runtime.warm_start.client import WarmServer


@dataclass(frozen=True, slots=True)
class Preparation:
    """Everything that the checks leave for the run.

    Attributes:
        devices: of learner and generators.
        notices: about valid settings, a sentence each.
        warm: services are forked from it; None: they are executed.
    """

    devices: DevicePlan
    notices: Sequence[str] = ()
    warm: WarmServer | None = None
