"""Numbers of ranks and generators that a placement may have on the devices of a plan, the nearest ones first.

They fill the devices: in turns all sides have all of them. Apart, the learner has as few as it needs, and generators
have the rest. Fewer generators are tried where so many do not fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rollmesh.mesh.config.derived.generator_places import devices_per_generator
from rollmesh.mesh.config.models import Config
from rollmesh.planning.cluster import Cluster
from rollmesh.planning.placement import node_counts, spread
from rollmesh.planning.proposal import BUDGET, rank_counts

_IN_TURNS = ("collocated", "auto")


def layouts(
    config: Config, mode: str, cluster: Cluster, smallest: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Keys of each layout that the configuration has otherwise; the first one that fits is the best.

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
        for replicas in _replicas(config, mode, cluster, keys)
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
    """Numbers of ranks: in turns the largest first. Apart as many as configured, else as few as possible."""
    configured, counts = config.learner.ranks, list(rank_counts(config, cluster))
    if mode not in _IN_TURNS:
        return [configured, *(count for count in counts if count != configured)]
    all_devices = cluster.count - cluster.count % counts[0] if counts else 0
    possible = {*counts, all_devices, min(configured, cluster.count)} - {0}
    return sorted(possible, reverse=True)


def _replicas(config: Config, mode: str, cluster: Cluster, learner: Mapping[str, Any]) -> list[int]:
    """Numbers of generators to try: all that find devices, on the learner's in turns, else beside them; then fewer."""
    each, configured = devices_per_generator(config.rollout), config.rollout.replicas
    if not each:
        # Their engine is elsewhere.
        return [configured]
    ranks, nodes = learner["learner.ranks"], learner.get("learner.distributed.nodes", config.learner.distributed.nodes)
    of_node = ranks // nodes
    if mode in _IN_TURNS:
        most = int(nodes * (of_node // each))
    else:
        others = (cluster.nodes - nodes) * (cluster.per_node // each)
        most = int(nodes * ((cluster.per_node - of_node) // each) + others)
    return [most, *([configured] if 0 < configured < most else [])] if most > 0 else []
