"""Results of the checks before a run: its devices, and notices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollmesh.launcher.placement.devices import DevicePlan


@dataclass(frozen=True, slots=True)
class Preparation:
    """Everything that the checks leave for the run.

    Attributes:
        devices: of learner and generators.
        notices: about valid settings, a sentence each.
    """

    devices: DevicePlan
    notices: Sequence[str] = ()
