"""Watches what decodes, as the launcher watches services: an engine that is frozen is a dead one.

The generator answers for itself while its engine does not: the engine's processes are not its own, and its thread is
one of several. An engine may rightly be silent for longer than a service: it answers between two steps alone, and a
step may compile kernels, record graphs, prefill what is long or wait for a disk. A stopped one does none of these.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rollmesh.generators.engines.interface import EngineError, InferenceEngine
from rollmesh.mesh.errors import StuckError
from rollmesh.mesh.liveness.freeze_detector import Bounds, Frozen
from rollmesh.mesh.liveness.watchdog import Answer, wait_until_frozen

# How many times as long as a service an engine may run, or sleep, without an answer.
_RUNNING_FACTOR = 30.0
_ASLEEP_FACTOR = 3.0


class FrozenEngineError(EngineError):
    """The engine lives and does not answer."""

    code = "engine_frozen"
    exit_code = StuckError.exit_code

    def __init__(self, verdict: Frozen) -> None:
        hint = "resources.frozen_after_s says when silence is a failure; the generator has to be started again"
        super().__init__(f"the engine is frozen: {verdict}", hint=hint)


def bounds_of(frozen_after_s: float) -> Bounds:
    """Of an engine's silence; `frozen_after_s` as in `resources`."""
    bounds = Bounds.of(frozen_after_s)
    return replace(bounds, running_s=_RUNNING_FACTOR * bounds.running_s, asleep_s=_ASLEEP_FACTOR * bounds.asleep_s)


async def watch(engine: InferenceEngine, frozen_after_s: float) -> None:
    """Watches an engine from when it is ready; its caller stops it then, which kills its processes.

    Args:
        engine: started.
        frozen_after_s: as `resources.frozen_after_s`.

    Raises:
        FrozenEngineError: it is frozen.
    """

    async def ask() -> Answer:
        try:
            await asyncio.wrap_future(engine.ping())
        except EngineError:
            # It has failed or is being stopped, which is told elsewhere; or the question was lost on its way.
            return Answer.NONE
        return Answer.WELL

    raise FrozenEngineError(await wait_until_frozen(engine.sight, ask, bounds_of(frozen_after_s)))
