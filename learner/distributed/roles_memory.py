"""All roles' memory away from the device and back, on every rank; what cannot be done on one is undone on all.

Invariants: both moves are collective. After a move that has failed every rank has its memory where it was before. So
the devices belong to one side on all ranks. Where the way back fails too, all of it counts as away.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping

import torch

from rollmesh.learner.distributed.turn_memory import (
    MemoryInUse,
    RoleMemory,
    RoleNeed,
    TurnMemory,
    memory_in_use,
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
        before = memory_in_use(self._device)
        gc.collect()
        moved, reason = self._move(lambda engine: engine.offload())
        if reason:
            _, undone = self._move(lambda engine: engine.onload())
            # Parts that did not come back count as all: what is away cannot compute, and `onload` brings the rest.
            self._away = bool(undone)
            raise SwapError(
                "; ".join(filter(None, (f"the learner's state cannot leave the devices: {reason}", undone)))
            )
        self._away = True
        return self._report(moved, before)

    def onload(self) -> TurnMemory:
        """Brings back what a turn needs, by role as `resident_roles` chooses; collective.

        A role that does not stay comes for each of its phases. Parts that rest between calls do likewise.

        Raises:
            MemoryError: a rank has no room for it; all ranks have it away as before.
        """
        before = memory_in_use(self._device)
        resident = self._choose_resident()
        for role, engine in self._engines.items():
            rests = role not in resident
            # Gradients last from one call of a phase to the next.
            engine.rest_between_calls(params=rests, optimizer=rests)
        moved, reason = self._move(lambda engine: engine.onload())
        if reason:
            _, undone = self._move(lambda engine: engine.offload())
            raise MemoryError(
                "; ".join(filter(None, (f"the devices have no room for the learner's state: {reason}", undone)))
            )
        self._away = False
        return self._report(moved, before, resident)

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

    def _move(self, move: Callable[[Engine], None]) -> tuple[dict[str, list[float]], str]:
        """Moves engine after engine; returns bytes by part and seconds by role, and why a rank could not."""
        moved: dict[str, list[float]] = {}
        failed: Exception | None = None
        for role, engine in self._engines.items():
            resting, began = engine.resting_bytes, time.perf_counter()
            try:
                move(engine)
            except LostTensorsError:
                raise
            except (OSError, MemoryError, RuntimeError, RollmeshError) as error:
                failed = error
                break
            now = engine.resting_bytes
            sizes = [float(abs(now.get(part, 0) - resting.get(part, 0))) for part in PARTS]
            moved[role] = [*sizes, time.perf_counter() - began]
        reasons = self._world.gather_failures(failed, _reason(failed))
        found = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
        return moved, "; ".join(found)

    def _report(
        self, moved: Mapping[str, list[float]], before: MemoryInUse, resident: frozenset[str] = frozenset()
    ) -> TurnMemory:
        after = memory_in_use(self._device)
        numbers = torch.tensor([moved[role] for role in self._engines], dtype=torch.float64)
        memory = torch.tensor([_numbers(before), _numbers(after)], dtype=torch.float64)
        seconds = self._world.max(torch.cat([numbers[:, 3], numbers[:, 3].sum()[None]])).tolist()
        sums = self._world.sum(numbers[:, :3]).tolist()
        in_use = [MemoryInUse(*map(int, values)) for values in self._world.sum(memory).tolist()]
        roles = {
            role: RoleMemory(int(params), int(optimizer), int(gradients), taken)
            for role, (params, optimizer, gradients), taken in zip(self._engines, sums, seconds[:-1], strict=True)
        }
        return TurnMemory(roles, seconds[-1], in_use[0], in_use[1], tuple(sorted(resident)))


def _numbers(memory: MemoryInUse) -> list[int]:
    return [memory.anonymous, memory.shared, memory.device, memory.device_peak]


def _free_bytes(device: torch.device) -> int:
    """Free bytes of this rank's device, or its part of those of the host."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _reason(failed: Exception | None) -> str:
    """The first line of an error; empty without one."""
    return "" if failed is None else (str(failed).splitlines() or [type(failed).__name__])[0]
