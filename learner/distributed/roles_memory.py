"""All roles' memory away from the device and back, on every rank; what cannot be done on one is undone on all.

Invariants: both moves are collective. After a move that has failed every rank has its memory where it was before. So
the devices belong to one side on all ranks. Where the way back fails too, all of it counts as away.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping

import torch

from rollmesh.learner.distributed.turn_memory import (
    RoleNeed,
    TurnMemory,
    held_bytes,
    resident_roles,
    state_budget,
)
from rollmesh.learner.engines.interface import ACTOR, Engine
from rollmesh.learner.engines.rest_file import LostTensorsError
from rollmesh.learner.engines.resting_parts import PARTS
from rollmesh.mesh.errors import RollmeshError, SwapError
from rollmesh.mesh.runtime.host_memory import free_host_bytes

# Moments of AdamW in float32, before a first step has made them; other optimizers have fewer.
_MOMENTS = 2


class RolesMemory:
    """The memory of this rank's engines.

    Args:
        engines: by role, in the same order on every rank.
    """

    def __init__(self, engines: Mapping[str, Engine]) -> None:
        self._engines = engines
        self._world = engines[ACTOR].world
        self._device = engines[ACTOR].device
        self._away = False

    def require(self) -> None:
        """Refuses work with models that are away.

        Raises:
            RuntimeError: they are.
        """
        if self._away:
            raise RuntimeError("the models of all roles are away from the devices: call `onload` first")

    def offload_nonresident(self) -> None:
        """Has roles that will not stay leave before the first batch, while there is no optimizer state; collective.

        Raises:
            SwapError: see `offload`.
            MemoryError: see `onload`.
        """
        if len(self._engines) > 1:
            self.offload()
            self.onload()

    def offload(self) -> TurnMemory:
        """Moves everything of all roles away, also what rests between calls already; collective.

        Raises:
            SwapError: a rank has no room for it; all ranks have kept it, or count as away where they could not.
            LostTensorsError: a disk has lost tensors of this rank, and no move repairs that.
        """
        before = held_bytes(self._device)
        gc.collect()
        if reason := self._move(lambda engine: engine.offload()):
            undone = self._move(lambda engine: engine.onload())
            # Parts that did not come back count as all: what is away cannot compute, and `onload` brings the rest.
            self._away = bool(undone)
            raise SwapError(
                "; ".join(filter(None, (f"the learner's state cannot leave the devices: {reason}", undone)))
            )
        self._away = True
        freed = torch.tensor([float(before - held_bytes(self._device))], dtype=torch.float64)
        return TurnMemory(max(0, int(self._world.sum(freed).item())))

    def onload(self) -> None:
        """Brings back what a turn needs, by role as `resident_roles` chooses; collective.

        A role that does not stay comes for each of its phases. Parts that rest between calls do likewise.

        Raises:
            MemoryError: a rank has no room for it; all ranks have it away as before.
        """
        resident = self._choose_resident()
        for role, engine in self._engines.items():
            rests = role not in resident
            # Gradients last from one call of a phase to the next.
            engine.rest_between_calls(params=rests, optimizer=rests)
        if reason := self._move(lambda engine: engine.onload()):
            undone = self._move(lambda engine: engine.offload())
            raise MemoryError(
                "; ".join(filter(None, (f"the devices have no room for the learner's state: {reason}", undone)))
            )
        self._away = False

    def _choose_resident(self) -> frozenset[str]:
        """The same on every rank: by the largest needs and the least room."""
        needs = [self._need(engine) for engine in self._engines.values()]
        *sizes, lacking = self._world.max_ints([*needs, -state_budget(_free_bytes(self._device))])
        roles = zip(self._engines.items(), sizes, strict=True)
        return resident_roles(
            {role: RoleNeed(size, engine.trained) for (role, engine), size in roles}, -lacking, always=ACTOR
        )

    @staticmethod
    def _need(engine: Engine) -> int:
        """Bytes on this rank that a role takes while it computes; everything is away.

        Gradients that are gone come again in the size of the parameters. A state that no step has made yet is taken
        for that of AdamW.
        """
        resting = engine.resting_bytes
        params, optimizer, gradients = (resting.get(part, 0) for part in PARTS)
        if not engine.trained:
            return params
        return params + (gradients or params) + (optimizer or _MOMENTS * params)

    def _move(self, move: Callable[[Engine], None]) -> str:
        """Moves engine after engine; returns why a rank could not, or nothing."""
        failed: Exception | None = None
        for engine in self._engines.values():
            try:
                move(engine)
            except LostTensorsError:
                raise
            except (OSError, MemoryError, RuntimeError, RollmeshError) as error:
                failed = error
                break
        reasons = self._world.gather_failures(failed, _reason(failed))
        return "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason)


def _free_bytes(device: torch.device) -> int:
    """Free bytes of this rank's device, or its part of those of the host."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _reason(failed: Exception | None) -> str:
    """The first line of an error; empty without one."""
    return "" if failed is None else (str(failed).splitlines() or [type(failed).__name__])[0]
