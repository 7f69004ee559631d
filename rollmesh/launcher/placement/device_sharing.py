"""Checks of devices with several users: at the same time they have to leave room, in turns they need not."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from rollmesh.mesh.config.derived.generator_places import GeneratorPlace
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError

# Shares of a device's memory that engines may take together: next to the learner, and among themselves.
_MOST_WITH_LEARNER = 0.5
_MOST_AMONG_ENGINES = 0.9
# In turns: the context of the learner's process stays on the device, with what its libraries keep.
_MOST_IN_TURNS = 0.95


def check_sharing(
    config: Config, learner: Sequence[int], generators: Sequence[Sequence[int]], places: Sequence[GeneratorPlace]
) -> None:
    """Devices that are given twice must leave room for who uses them at the same time, and NCCL takes one only once.

    Args:
        config: of the run.
        learner: numbers of the ranks' devices.
        generators: numbers of each generator's devices; empty: they have none.
        places: the generators.

    Raises:
        ConfigError: names the key, and a value that would do.
    """
    engines = Counter(number for devices in generators for number in devices)
    turns = _in_turns(learner, generators, places)
    shared = sorted(number for number, users in engines.items() if users > 1 or number in learner)
    if not shared:
        return
    _check_shares(config, learner, engines, turns)
    if config.weights.transport == "nccl":
        raise ConfigError(
            f"weights.transport is nccl, and device {shared[0]} has two users: NCCL takes a device once",
            hint="set weights.transport: auto, or give each its own device",
        )


def _in_turns(
    learner: Sequence[int], generators: Sequence[Sequence[int]], places: Sequence[GeneratorPlace]
) -> set[int]:
    """Devices on which generators sleep while the learner trains.

    Raises:
        ConfigError: a generator takes turns on a device that is not the learner's, or has one of its own that is.
    """
    turns: set[int] = set()
    for place, devices in zip(places, generators, strict=bool(generators)):
        strangers = [number for number in devices if number not in learner]
        if place.shares_devices and strangers:
            raise ConfigError(
                f"placement.devices.generators: {place.name} takes turns with the learner, which does not have device "
                f"{strangers[0]}",
                hint=f"name devices of the learner: {', '.join(map(str, learner))}",
            )
        turns |= set(devices) if place.shares_devices else set()
    for place, devices in zip(places, generators, strict=bool(generators)):
        taken = sorted(turns & set(devices))
        if not place.shares_devices and taken:
            raise ConfigError(
                f"placement.devices.generators: {place.name} has device {taken[0]} for itself, on which others take "
                "turns",
                hint="give it another device",
            )
    return turns


def _check_shares(config: Config, learner: Sequence[int], engines: Counter[int], turns: set[int]) -> None:
    rollout = config.rollout
    keys = {
        "vllm": ("rollout.vllm.gpu_memory_utilization", rollout.vllm.gpu_memory_utilization),
        "sglang": ("rollout.sglang.mem_fraction", rollout.sglang.mem_fraction),
    }
    if rollout.engine not in keys:
        return
    key, share = keys[rollout.engine]
    for number, count in sorted(engines.items()):
        with_learner = number in learner and number not in turns
        users = count + with_learner
        if users == 1 and (number not in turns or share is None):
            continue
        most = _MOST_WITH_LEARNER if with_learner else _MOST_AMONG_ENGINES if count > 1 else _MOST_IN_TURNS
        if share is None or share > most / count:
            beside = f"{users} users at the same time" if users > 1 else "the context of a sleeping learner beside it"
            raise ConfigError(
                f"{key} leaves too little of device {number}, which has {beside}",
                hint=f"set it to {_floor(most / count):g} or less, or give each its own device",
            )


def _floor(share: float) -> float:
    return math.floor(100 * share) / 100
