"""Numbers of ranks and generators that a placement may have on the devices of a plan, the nearest ones first.

In turns all sides have the same devices. Apart, the learner has as few as it needs, and generators as many of the rest
as are configured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rollmesh.mesh.config.generator_places import devices_per_generator
from rollmesh.mesh.config.models import Config
from rollmesh.planning.cluster import Cluster
from rollmesh.planning.placement import node_counts, spread
from rollmesh.planning.proposal import BUDGET, rank_counts

_IN_TURNS = ("collocated", "auto")


def layouts(
    config: Config, mode: str, cluster: Cluster, smallest: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Keys of each layout that the configuration has otherwise; the first one is the nearest to it.

    Args:
        config: of the run.
        mode: `placement.mode`.
        cluster: the devices. CPUs leave nothing to choose.
        smallest: settings of the learner's smallest layout, as `propose` finds it; tried last.
    """
    fixed = _fixed(config, mode)
    divided = cluster.cuda and "cpu" not in (config.learner.device, config.rollout.device)
    learners = []
    if divided:
        counts = _in_order(config, mode, cluster)
        learners = [spread(config, ranks, nodes) for ranks in counts for nodes in node_counts(cluster, ranks)]
        learners += [_with_tokens_that_fit(config, smallest)] if smallest is not None else []
    found = [
        fixed | _changed(config, keys | {"rollout.replicas": replicas})
        for keys in learners
        if (replicas := _replicas(config, mode, cluster, keys))
    ]
    # Where devices are too few for any, the plan of the configured numbers says so.
    yield from found or [fixed]


def _with_tokens_that_fit(config: Config, smallest: Mapping[str, Any]) -> dict[str, Any]:
    """A layout with its budget of tokens only where that is less than the configured one."""
    fewer = smallest.get(BUDGET, 0) < config.learner.batch.tokens_per_micro_batch
    return {key: value for key, value in smallest.items() if fewer or key != BUDGET}


def _fixed(config: Config, mode: str) -> dict[str, Any]:
    """The mode; devices that are named for one layout are not those of another."""
    named, asked = config.placement.devices, config.placement
    without: dict[str, Any] = {
        f"placement.devices.{role}": None
        for role, listed in (("learner", named.learner), ("generators", named.generators))
        if listed is not None
    }
    if asked.shared_generators is not None:
        without["placement.shared_generators"] = None
    return without | ({} if asked.mode == mode else {"placement.mode": mode})


def _changed(config: Config, keys: dict[str, Any]) -> dict[str, Any]:
    """Without numbers that the configuration has already."""
    same = {"learner.ranks": config.learner.ranks, "rollout.replicas": config.rollout.replicas}
    return {key: value for key, value in keys.items() if same.get(key) != value}


def _in_order(config: Config, mode: str, cluster: Cluster) -> list[int]:
    """Numbers of ranks.

    In turns the learner has the devices of the configured generators too, else more, else fewer. Apart it has as many
    as configured, else as few as possible.
    """
    configured, counts = config.learner.ranks, list(rank_counts(config, cluster))
    if mode not in _IN_TURNS:
        return [configured, *(count for count in counts if count != configured)]
    used = configured
    if not config.placement.takes_turns:
        used += config.rollout.replicas * devices_per_generator(config.rollout)
    near = [count for count in (*counts, configured) if configured <= count <= min(used, cluster.count)]
    first = max(near, default=configured)
    more = [count for count in counts if count > first]
    fewer = [count for count in sorted({*counts, configured}, reverse=True) if count < first]
    return [first, *more, *fewer]


def _replicas(config: Config, mode: str, cluster: Cluster, learner: Mapping[str, Any]) -> int:
    """Generators that have devices with the learner's: on theirs in turns, else beside them, at most as configured."""
    ranks, nodes = learner["learner.ranks"], learner.get("learner.distributed.nodes", config.learner.distributed.nodes)
    each, of_node = max(1, devices_per_generator(config.rollout)), ranks // nodes
    if mode in _IN_TURNS:
        return int(nodes * (of_node // each))
    others = (cluster.nodes - nodes) * (cluster.per_node // each)
    return min(config.rollout.replicas, int(nodes * ((cluster.per_node - of_node) // each) + others))
