"""Watches the engine, as the launcher watches services: a frozen engine counts as dead.

The generator answers while its engine does not: the engine's processes are not its own, and its thread is one of
several. An engine may rightly be silent for longer than a service: it answers between two steps alone. A step may
compile kernels, record graphs, prefill long sequences or wait for a disk. A stopped engine does not do these either.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rollmesh.generators.engines.errors import EngineError
from rollmesh.generators.engines.interface import InferenceEngine
from rollmesh.mesh.errors import StuckError
from rollmesh.mesh.liveness.freeze_detector import Bounds, Frozen
from rollmesh.mesh.liveness.watchdog import ProbeAnswer, wait_until_frozen

# Multiple of a service's time that an engine may run, or sleep, without an answer.
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
    """Bounds of an engine's silence; `frozen_after_s` as in `resources`."""
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

    async def ping() -> ProbeAnswer:
        try:
            await asyncio.wrap_future(engine.ping())
        except EngineError:
            # It has failed or is being stopped, which is reported elsewhere; or the ping was lost.
            return ProbeAnswer.NONE
        return ProbeAnswer.WELL

    raise FrozenEngineError(await wait_until_frozen(engine.process_state, ping, bounds_of(frozen_after_s)))
