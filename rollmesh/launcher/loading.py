"""The time in which a service loads: models of any size from any disk, and what it compiles.

Invariants: a process that loads answers the health check, and is killed only where it is frozen or its limit has
passed. Calls that hold the interpreter are longer than later ones: a tensor is read from a slow disk in one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from rollmesh.mesh.liveness.freeze_detector import Bounds

REPORT_EVERY_S = 60.0
# Like the first step's.
_LEAST_S = 600.0
_RUNNING_FACTOR = 30.0
_ASLEEP_FACTOR = 3.0


@dataclass(frozen=True, slots=True)
class Loading:
    """A service that answers the health check before it loads.

    Attributes:
        name: of the ready file that it writes then.
        most_s: seconds within which it must have loaded; inf: no limit.
    """

    name: str
    most_s: float

    @classmethod
    def of_learner(cls, name: str, stall_limit_s: float) -> Loading:
        """The learner's, which may load as long as a run may make no progress.

        Args:
            name: see the class.
            stall_limit_s: `buffer.stall_limit_s`.
        """
        return cls(name, max(stall_limit_s, _LEAST_S) if stall_limit_s else math.inf)


def loading_bounds(frozen_after_s: float, leaving_s: float) -> Bounds:
    """Bounds of the silence of a process that loads; see `Bounds.of`."""
    usual = Bounds.of(frozen_after_s, leaving_s=leaving_s)
    return replace(usual, running_s=_RUNNING_FACTOR * usual.running_s, asleep_s=_ASLEEP_FACTOR * usual.asleep_s)


async def report_loading(service: str, most_s: float, report: Callable[[str], None], every_s: float) -> None:
    """Reports every minute that a service still loads; to be cancelled."""
    limit = "without limit" if math.isinf(most_s) else f"at most {most_s:.0f} s (buffer.stall_limit_s)"
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        await asyncio.sleep(every_s)
        report(f"{service} has loaded models for {loop.time() - began:.0f} s, {limit}: logs/{service}.log says more")
