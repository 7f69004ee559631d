"""The memory of all roles where a learner trains in turns on shared devices: records, and the choice of what stays.

Nothing here does I/O but `held_bytes`, which reads what the kernel or the device knows of this process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import torch

from rollmesh.mesh.runtime.process_memory import resident_memory

# The part of free memory that models and optimizers may fill; the rest is for activations and messages.
_STATE_SHARE = 0.6
# The passes of a trained role over its memory in a batch, against one of a role that is only read.
_TRAINED_PASSES = 2


@dataclass(frozen=True, slots=True)
class TurnMemory:
    """The result of an offload of all roles.

    Attributes:
        freed_bytes: memory that the ranks hold less than before, as measured; 0 where they hold more.
    """

    freed_bytes: int


@dataclass(frozen=True, slots=True)
class RoleNeed:
    """The memory of a role on a rank's device while it computes.

    Attributes:
        nbytes: of parameters, and of optimizer and gradients where it is trained.
        trained: it has an optimizer.
    """

    nbytes: int
    trained: bool


def resident_roles(needs: Mapping[str, RoleNeed], budget: int, *, always: str) -> frozenset[str]:
    """The roles that stay on the device for a whole turn; each other one comes for its own phases.

    The resident ones and the largest of the others must fit together. Among the choices that fit, the one wins that
    moves the fewest bytes in a batch. Ties go to the choice with fewer bytes on the device.

    Args:
        needs: by role.
        budget: bytes for all of them.
        always: the role that stays even where nothing fits.
    """
    others = sorted(role for role in needs if role != always)
    best: tuple[int, int] | None = None
    chosen = frozenset({always})
    for size in range(len(others) + 1):
        for stay in combinations(others, size):
            resident = frozenset({always, *stay})
            coming = [needs[role] for role in others if role not in resident]
            held = sum(needs[role].nbytes for role in resident)
            if held + max((need.nbytes for need in coming), default=0) > budget:
                continue
            moved = sum(need.nbytes * (_TRAINED_PASSES if need.trained else 1) for need in coming)
            if best is None or (moved, held) < best:
                best, chosen = (moved, held), resident
    return chosen


def state_budget(free: int) -> int:
    """Bytes that models and optimizers may fill.

    Args:
        free: bytes of this rank's device, or of its part of the host, while everything is away.
    """
    return int(free * _STATE_SHARE)


def held_bytes(device: torch.device) -> int:
    """Bytes that torch's allocator has reserved on this process's device; on a CPU, resident pages of no file."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else resident_memory().anonymous
