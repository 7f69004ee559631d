"""The mesh of ranks over which a model is sharded: all of them, or several copies over runs of neighbours (HSDP).

Neighbours have numbers that follow one another, as ranks of a machine do. Parameters are gathered and gradients
scattered among them alone. Only sums of gradients, a shard each, travel between copies.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rollmesh.learner.engines.world import World
from rollmesh.mesh.errors import ConfigError

KEY = "learner.parallel.shards"


def shard_mesh(world: World, shards: int | None) -> DeviceMesh | None:
    """The mesh to shard over; collective.

    Args:
        world: the ranks.
        shards: ranks that hold a model together; None: all.

    Returns:
        [copies, shards], or [shards] for one copy; None where there is no process group, and nothing is sharded.

    Raises:
        ConfigError: the ranks cannot be divided so.
    """
    if shards is None or check_shards(shards, world.processes) == 1:
        return mesh_of_all(world.device.type) if dist.is_initialized() else None
    groups = [world.counterparts(shards), world.neighbours(shards)]
    ranks = [list(range(first, first + shards)) for first in range(0, world.processes, shards)]
    return DeviceMesh.from_group(groups, world.device.type, ranks, mesh_dim_names=("copies", "shards"))


def mesh_of_all(device_type: str) -> DeviceMesh:
    """The mesh of all ranks of the process group. FSDP2's own would be on the machine's accelerator, if it has one."""
    assert dist.group.WORLD is not None
    return DeviceMesh.from_group(dist.group.WORLD, device_type)


def check_shards(shards: int, processes: int, key: str = KEY) -> int:
    """The number of copies.

    Args:
        shards: ranks that hold a model together.
        processes: of the learner.
        key: of the configuration, for the error.

    Raises:
        ConfigError: names the nearest number of shards that works.
    """
    if processes % shards == 0:
        return processes // shards
    works = [number for number in range(1, processes + 1) if processes % number == 0]
    nearest = min(works, key=lambda number: (abs(number - shards), -number))
    raise ConfigError(
        f"{key}: {shards} does not divide the learner's {processes} ranks",
        hint=f"set {key}: {nearest}, the nearest that does, or leave it out",
    )
