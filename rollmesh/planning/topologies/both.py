"""Both placements of one configuration, planned: on devices of their own, and in turns on the same ones.

A placement that does not fit as configured is tried with other numbers of ranks and generators. `rollmesh plan` names
the other placement where only that one fits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rollmesh.mesh.config.derived.generator_places import generator_places
from rollmesh.mesh.config.models import Config
from rollmesh.mesh.errors import ConfigError
from rollmesh.planning.plan import Plan
from rollmesh.planning.settings import flags, with_settings
from rollmesh.planning.switches import Planner
from rollmesh.planning.topologies.layouts import layouts

_OTHER = {"split": "collocated", "hybrid": "collocated", "collocated": "split", "auto": "split"}
# A hint at the end of a message.
_ADVICE = re.compile(r" \([^()]*(?:\([^()]*\)[^()]*)*\)$")


@dataclass(frozen=True, slots=True)
class Topology:
    """A placement of the run.

    Attributes:
        mode: `placement.mode`.
        settings: keys that the configuration has otherwise; none: it is as configured.
        plan: memory.
        refused: numbers of ranks that do not fit either.
    """

    mode: str
    settings: dict[str, Any]
    plan: Plan
    refused: tuple[int, ...] = ()

    @property
    def verdict(self) -> str:
        """It fits, or the first obstacle, without advice."""
        if self.plan.fits:
            return f"fits{_idle(self.plan)}"
        others = f", nor with learner.ranks {', '.join(map(str, self.refused))}" if self.refused else ""
        return f"does NOT fit{others}: {_ADVICE.sub('', self.plan.problems[0])}"

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "mode": self.mode,
            "settings": self.settings,
            "fits": self.plan.fits,
            "problems": list(self.plan.problems),
            "refused_ranks": list(self.refused),
            "devices": [use.to_json() for use in self.plan.devices],
            "host": self.plan.host,
        }


def topologies(
    config: Config, plan: Plan, planner: Planner, smallest: Mapping[str, Any] | None = None
) -> tuple[Topology, ...]:
    """The configured placement, its nearest layout that fits where that is another one, then the other placement.

    Empty for a run without generators here.

    Args:
        config: of the run.
        plan: its own.
        planner: plans another configuration on the same devices.
        smallest: settings of the learner's smallest layout; None: there is none.
    """
    if not generator_places(config):
        return ()
    mode = config.placement.mode
    found = [Topology(mode, {}, plan)]
    tried = {each: layouts(config, each, plan.cluster, smallest) for each in (mode, _OTHER[mode])}
    if not plan.fits and (same := _nearest(config, mode, tried[mode], planner)) and same.plan.fits:
        found.append(same)
    if other := _nearest(config, _OTHER[mode], tried[_OTHER[mode]], planner):
        found.append(other)
    return tuple(found)


def topology_lines(found: tuple[Topology, ...]) -> Iterator[str]:
    """Both placements in words, and the other one where only it fits."""
    for topology in found:
        keys = f" ({flags(topology.settings)})" if topology.settings else ""
        yield f"placement {topology.mode}{keys}: {topology.verdict}"
    fitting = [topology for topology in found if topology.plan.fits]
    if fitting and all(topology.mode != found[0].mode for topology in fitting):
        yield f"only placement {fitting[0].mode} fits: add {flags(fitting[0].settings)}"


def _idle(plan: Plan) -> str:
    """Devices that no one uses, in words; empty without any."""
    placement = plan.placement
    own = placement.generators - placement.in_turns * placement.learner_nodes
    idle = plan.cluster.count - placement.ranks - max(0, own) * placement.devices_per_generator
    return f", {idle} of {plan.cluster.count} devices stay idle" if plan.cluster.cuda and idle > 0 else ""


def _nearest(config: Config, mode: str, candidates: Iterator[dict[str, Any]], planner: Planner) -> Topology | None:
    """A placement at the first layout that fits, else at the one that needs least of the learner's devices.

    None: no layout is possible.
    """
    tried: list[tuple[dict[str, Any], Plan]] = []
    for settings in candidates:
        try:
            planned = planner(with_settings(config, settings))
        except ConfigError:
            continue
        if planned.fits:
            return Topology(mode, settings, planned)
        tried.append((settings, planned))
    if not tried:
        return None
    settings, least = min(tried, key=lambda pair: (bool(pair[1].placement.problems), pair[1].learner_peak))
    refused = sorted({planned.placement.ranks for _, planned in tried} - {least.placement.ranks})
    return Topology(mode, settings, least, tuple(refused))
