"""The memory of all roles where a learner trains in turns on shared devices: records, and the choice of what stays.

Nothing here does I/O but `memory_in_use`, which reads what the kernel and the device know of this process.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import combinations

import torch

from rollmesh.mesh.runtime.process_memory import resident_memory

# The part of free memory that models and optimizers may fill; the rest is for activations and messages.
_STATE_SHARE = 0.6
# The passes of a trained role over its memory in a batch, against one of a role that is only read.
_TRAINED_PASSES = 2


@dataclass(frozen=True, slots=True)
class RoleMemory:
    """The bytes of one role that moved to the host or back, summed over the ranks.

    Attributes:
        params, optimizer, gradients: bytes of each part.
        seconds: of the slowest rank.
    """

    params: int = 0
    optimizer: int = 0
    gradients: int = 0
    seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return self.params + self.optimizer + self.gradients


@dataclass(frozen=True, slots=True)
class MemoryInUse:
    """Memory of processes, in bytes.

    Attributes:
        anonymous: resident pages that belong to no file (RssAnon).
        shared: resident pages of shared memory (RssShmem); several processes may count the same ones.
        device: reserved by torch's allocator; 0 on a CPU.
        device_peak: the largest `device` since the last batch or the last move.
    """

    anonymous: int = 0
    shared: int = 0
    device: int = 0
    device_peak: int = 0


@dataclass(frozen=True, slots=True)
class TurnMemory:
    """The result of a move of all roles, for the memory of the ranks.

    Attributes:
        roles: by name.
        seconds: of the slowest rank.
        before, after: memory in use, summed over the ranks.
        resident: roles that stay on the device while others compute.
    """

    roles: Mapping[str, RoleMemory]
    seconds: float
    before: MemoryInUse
    after: MemoryInUse
    resident: Collection[str] = field(default_factory=tuple)

    @property
    def moved_bytes(self) -> int:
        """Bytes of all roles that moved."""
        return sum(role.nbytes for role in self.roles.values())

    @property
    def freed_bytes(self) -> int:
        """Memory that the ranks hold less than before, as measured; 0 where they hold more."""
        on_device = self.before.device > 0 or self.after.device > 0
        freed = self.before.device - self.after.device if on_device else self.before.anonymous - self.after.anonymous
        return max(freed, 0)


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


def memory_in_use(device: torch.device) -> MemoryInUse:
    """Memory of this process; the peak of its device begins again."""
    host = resident_memory()
    if device.type != "cuda":
        return MemoryInUse(host.anonymous, host.shared)
    found = MemoryInUse(
        host.anonymous, host.shared, torch.cuda.memory_reserved(device), torch.cuda.max_memory_reserved(device)
    )
    torch.cuda.reset_peak_memory_stats(device)
    return found
