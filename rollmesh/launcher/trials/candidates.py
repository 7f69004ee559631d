"""The placements that `placement: auto` compares on this machine: in turns, apart in each ratio, and both. Pure.

On CUDA devices a ratio is a number of ranks and of generators on the devices that the learner has in turns. On a CPU it
is the number of threads of each. A placement that the machine or the configuration does not allow is left out, with the
reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rollmesh.launcher.placement.devices import DevicePlan, assign_devices
from rollmesh.launcher.placement.visible import VisibleDevices
from rollmesh.launcher.services import thread_plan
from rollmesh.launcher.trials.estimates import Division
from rollmesh.mesh.config import load_config
from rollmesh.mesh.config.derived.generator_places import devices_per_generator, generator_places
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.config.placement import PlacementSection
from rollmesh.mesh.errors import ConfigError
from rollmesh.mesh.runtime.threads import ThreadPlan

IN_TURNS: Final = "collocated"
_AS_CONFIGURED: Mapping[str, Mapping[str, Any]] = {mode: {"placement.mode": mode} for mode in ("split", "hybrid")}
# On more cores not every number of them is a ratio of its own.
_MOST_RATIOS = 8


@dataclass(frozen=True, slots=True)
class Candidate:
    """A placement.

    Attributes:
        name: in events and records.
        settings: keys that the configuration has otherwise.
        config: of the run in this placement.
        threads, devices: of its services.
        division: of cores or devices.
    """

    name: str
    settings: Mapping[str, Any]
    config: Config
    threads: ThreadPlan
    devices: DevicePlan
    division: Division


def candidates(asked: Config, visible: VisibleDevices, cores: int) -> tuple[dict[str, Candidate], list[str]]:
    """All placements by name, the first in turns; and the reasons why others are left out.

    Args:
        asked: the configuration, with `placement.mode: auto`.
        visible: CUDA devices.
        cores: of this machine.

    Raises:
        ConfigError: even in turns the run does not fit.
    """
    base = place(asked, IN_TURNS, {"placement.mode": IN_TURNS}, visible, cores)
    found = {IN_TURNS: base}
    if not generator_places(asked):
        return found, ["all others: rollout.replicas is 0, and generators that are started by hand stay as they are"]
    left_out = []
    for name, settings in (*_AS_CONFIGURED.items(), *_ratios(asked, base, cores)):
        try:
            candidate = place(asked, name, settings, visible, cores)
        except ConfigError as error:
            left_out.append(f"{name}: {error.message}")
            continue
        if all(candidate.division != other.division for other in found.values()):
            found[name] = candidate
    return found, left_out


def place(asked: Config, name: str, settings: Mapping[str, Any], visible: VisibleDevices, cores: int) -> Candidate:
    """The run in one placement.

    Raises:
        ConfigError: it contradicts the configuration, or the machine has too few devices.
    """
    config = in_placement(asked, settings)
    devices, threads = assign_devices(config, visible), thread_plan(config, cores)
    return Candidate(name, dict(settings), config, threads, devices, _division(config, threads, devices, cores))


def in_placement(asked: Config, settings: Mapping[str, Any]) -> Config:
    """The configuration of a run in one placement.

    Raises:
        ConfigError: the settings contradict it.
    """
    # That key is of mode auto alone.
    placement = PlacementSection(**asked.placement.model_dump(exclude_unset=True, exclude={"trial_batches"}))
    values = asked.model_copy(update={"placement": placement}).model_dump(mode="json", exclude_unset=True)
    return load_config(values, [f"{key}={value}" for key, value in settings.items()])


def _division(config: Config, threads: ThreadPlan, devices: DevicePlan, cores: int) -> Division:
    mode, places = config.placement.mode, generator_places(config)
    if devices.learner and devices.generators:
        given = zip(places, devices.generators, strict=True)
        own = [n for place, numbers in given if mode == IN_TURNS or not place.shares_devices for n in numbers]
        return Division(mode, len(devices.learner), max(1, len(set(own))))
    learner = min(cores, config.learner.ranks * threads.learner)
    generators = min(cores, config.rollout.replicas * threads.generator)
    return Division(mode, learner, generators if mode == IN_TURNS else max(1, min(generators, cores - learner)))


def _ratios(asked: Config, base: Candidate, cores: int) -> Iterator[tuple[str, dict[str, Any]]]:
    devices, resources = asked.placement.devices, asked.resources
    if base.devices.learner:
        if devices.learner is None and devices.generators is None:
            yield from _device_ratios(asked, len(base.devices.learner))
    elif resources.learner_threads is None and resources.generator_threads is None:
        yield from _core_ratios(asked, cores)


def _device_ratios(asked: Config, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    each, parallel = max(1, devices_per_generator(asked.rollout)), asked.learner.parallel
    # Ranks that share a model, or the tokens of a sequence, are no fewer.
    parts = math.lcm(parallel.tp * parallel.pp * parallel.cp, parallel.shards or 1, parallel.sp or 1)
    for ranks in _spread_over(count):
        replicas = (count - ranks) // each
        if replicas and ranks % parts == 0 and parallel.dp in (None, ranks // parts):
            keys = {"learner.ranks": ranks, "rollout.replicas": replicas}
            for mode in _AS_CONFIGURED:
                yield f"{mode}, {ranks} of {count} devices for the learner", {"placement.mode": mode, **keys}


def _core_ratios(asked: Config, cores: int) -> Iterator[tuple[str, dict[str, Any]]]:
    ranks, replicas = asked.learner.ranks, asked.rollout.replicas
    for learner in _spread_over(cores):
        if learner >= ranks and cores - learner >= replicas:
            keys = {
                "resources.learner_threads": learner // ranks,
                "resources.generator_threads": (cores - learner) // replicas,
            }
            yield f"split, {learner} of {cores} cores for the learner", {"placement.mode": "split", **keys}


def _spread_over(count: int) -> list[int]:
    """Numbers below a count; of many, some at equal distances."""
    parts = min(count, _MOST_RATIOS)
    return sorted({round(count * part / parts) for part in range(1, parts)} - {0, count})
