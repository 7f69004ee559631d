"""The run as trials use it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rollmesh.launcher.trials.candidates import Candidate
from rollmesh.launcher.trials.disturbances import MeshState
from rollmesh.mesh.errors import RollmeshError


@dataclass(frozen=True, slots=True)
class MeshControl:
    """The state of a run that trials read, and the calls by which they change it.

    Attributes:
        place: replaces learner and generators by those of a placement; raises `RollmeshError` where they cannot run.
        failure: what has ended a service of the placement on trial; None: all run.
        keep: the placement in force stays.
        strangers: generators that were started by hand and take turns, by name. They would sleep for ever.
        refusal: why a placement does not fit the memory; empty where it does.
        look: the state of the mesh.
        report: shows an event.
        launched: time at which the first learner was started.
        clock: Unix time in seconds.
    """

    place: Callable[[Candidate], Awaitable[None]]
    failure: Callable[[], RollmeshError | None]
    keep: Callable[[], None]
    strangers: Callable[[], Sequence[str]]
    refusal: Callable[[Candidate], Awaitable[str]]
    look: Callable[[], Awaitable[MeshState]]
    report: Callable[[str], None]
    launched: float
    clock: Callable[[], float] = time.time
