"""CUDA devices of roles with processes of their own on this machine: as named, else the first that are left."""

from __future__ import annotations

from collections.abc import Collection

from rollmesh.launcher.placement.visible import VisibleDevices
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError

_KEY = "placement.devices.roles"


def assign_roles(config: Config, taken: Collection[int], visible: VisibleDevices) -> dict[str, tuple[int, ...]]:
    """Devices of each role's ranks, by role.

    Args:
        config: of the run; the learner's side computes on CUDA.
        taken: numbers of the devices that learner and generators have.
        visible: devices that can be assigned.

    Raises:
        ConfigError: too few are left, or a list does not fit.
    """
    learner, named = config.learner, config.placement.devices.roles
    if unknown := [role for role in named if role not in learner.own_roles]:
        raise ConfigError(
            f"{_KEY}.{unknown[0]}: `rollmesh run` starts no processes for this role",
            hint=f"set learner.roles.{unknown[0]}.at: own, or leave it out",
        )
    used = {*taken, *(number for devices in named.values() for number in devices)}
    free = [number for number in range(len(visible.names)) if number not in used]
    given: dict[str, tuple[int, ...]] = {}
    for role in learner.own_roles:
        ranks = learner.ranks_of(role)
        if role in named:
            _check(config, role, taken, visible)
            given[role] = tuple(named[role])
            continue
        if len(free) < ranks:
            raise ConfigError(
                f"role {role} needs {ranks} CUDA device(s) of its own, but only {len(free)} of "
                f"{len(visible.names)} are left",
                hint=f"lower learner.roles.{role}.ranks or rollout.replicas, or set learner.roles.{role}.at: learner",
            )
        given[role], free = tuple(free[:ranks]), free[ranks:]
    return given


def _check(config: Config, role: str, taken: Collection[int], visible: VisibleDevices) -> None:
    named = config.placement.devices.roles
    devices, ranks = named[role], config.learner.ranks_of(role)
    key = f"{_KEY}.{role}"
    if len(devices) != ranks or len(set(devices)) < ranks:
        raise ConfigError(f"{key} names {len(devices)} device(s), {ranks} are needed", hint="a different one per rank")
    if unknown := [number for number in devices if number >= len(visible.names)]:
        raise ConfigError(
            f"{key}: no CUDA device {unknown[0]}, the last one here is {len(visible.names) - 1}",
            hint="numbers count within CUDA_VISIBLE_DEVICES where it is set",
        )
    others = {number for other, listed in named.items() if other != role for number in listed}
    if shared := sorted({*devices} & {*taken, *others}):
        raise ConfigError(
            f"{key}: device {shared[0]} has another user already",
            hint="name the devices of learner, generators and roles so that none is there twice",
        )
