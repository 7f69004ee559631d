"""The devices of ranks and generators, by the launcher's own rule, as numbers of users per device."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rollmesh.launcher.devices import VisibleDevices, assign_devices, devices_per_generator
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError
from rollmesh.planning.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Placement:
    """Users of the devices.

    Attributes:
        ranks: of the learner.
        generators: number of generators.
        devices_per_generator: of each.
        shared: generators stand on devices of ranks.
        generators_per_device: at most.
        processes: of a device, at most.
        problems: why it is impossible, in words.
    """

    ranks: int
    generators: int
    devices_per_generator: int
    shared: bool
    generators_per_device: int
    processes: int
    problems: tuple[str, ...] = ()


def place(config: Config, cluster: Cluster) -> Placement:
    """Places a run on a cluster; what is impossible is told, and planned all the same."""
    learner, rollout = config.learner, config.rollout
    each = devices_per_generator(rollout)
    seen = cluster.count if cluster.cuda else 0
    visible = VisibleDevices(tuple(str(number) for number in range(seen)), seen, seen)
    try:
        plan = assign_devices(config, visible)
    except ConfigError as error:
        problem = f"{error.message} ({error.hint})" if error.hint else error.message
        return Placement(learner.ranks, rollout.replicas, each, False, 1, 1, (problem,))
    users = Counter(number for devices in plan.generators for number in devices)
    shared = bool(set(users) & set(plan.learner))
    most = max(users.values(), default=1)
    return Placement(learner.ranks, rollout.replicas, each, shared, most, most + shared)
