"""Both placements of one configuration, planned: on devices of their own, and in turns on the same ones.

`rollmesh plan` names the other placement where only that one fits, or where it leaves more to generators.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollmesh.mesh.config.generator_places import devices_per_generator, generator_places
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError
from rollmesh.planning.plan import Plan
from rollmesh.planning.settings import flags, with_settings
from rollmesh.planning.switches import Planner


@dataclass(frozen=True, slots=True)
class Topology:
    """A placement of the run.

    Attributes:
        mode: `placement.mode`.
        settings: keys that the configuration has otherwise; none: it is as configured.
        plan: memory.
    """

    mode: str
    settings: dict[str, Any]
    plan: Plan

    @property
    def verdict(self) -> str:
        """It fits, or the first obstacle, without advice."""
        return "fits" if self.plan.fits else f"does NOT fit: {self.plan.problems[0].partition(' (')[0]}"

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "mode": self.mode,
            "settings": self.settings,
            "fits": self.plan.fits,
            "problems": list(self.plan.problems),
            "devices": [use.to_json() for use in self.plan.devices],
            "host": self.plan.host,
        }


def topologies(config: Config, plan: Plan, planner: Planner) -> tuple[Topology, ...]:
    """The configured placement, then the other one; empty for a run without generators here.

    Args:
        config: of the run.
        plan: its own.
        planner: plans another configuration on the same devices.
    """
    if not generator_places(config):
        return ()
    settings = _in_turns(config, plan) if config.placement.mode in ("split", "hybrid") else _apart(config)
    configured = Topology(config.placement.mode, {}, plan)
    try:
        other = planner(with_settings(config, settings))
    except ConfigError:
        return (configured,)
    return configured, Topology(str(settings["placement.mode"]), settings, other)


def topology_lines(found: tuple[Topology, ...]) -> Iterator[str]:
    """Both placements in words, and the other one where only it fits."""
    for topology in found:
        keys = f" ({flags(topology.settings)})" if topology.settings else ""
        yield f"placement {topology.mode}{keys}: {topology.verdict}"
    if len(found) > 1 and found[1].plan.fits and not found[0].plan.fits:
        yield f"only placement {found[1].mode} fits: add {flags(found[1].settings)}"


def _in_turns(config: Config, plan: Plan) -> dict[str, Any]:
    """Keys of turns on the learner's devices, with as many generators as these take."""
    each = max(1, devices_per_generator(config.rollout))
    settings = _unnamed(config) | {"placement.mode": "collocated"}
    if plan.cluster.cuda and config.learner.device != "cpu":
        replicas = max(1, plan.placement.ranks_per_node // each) * plan.placement.learner_nodes
        if replicas != config.rollout.replicas:
            settings["rollout.replicas"] = replicas
    return settings


def _apart(config: Config) -> dict[str, Any]:
    return _unnamed(config) | {"placement.mode": "split"}


def _unnamed(config: Config) -> dict[str, Any]:
    """Devices that are named for one placement are not those of the other."""
    named = config.placement.devices
    return {
        f"placement.devices.{role}": None
        for role, listed in (("learner", named.learner), ("generators", named.generators))
        if listed is not None
    }
