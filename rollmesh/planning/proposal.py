"""A layout and a micro-batch size for the learner: the smallest number of ranks, and the largest budget, that fit.

If hosts are too small for the configured weights, the search continues with keys that take less of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollmesh.mesh.config.models import Config
from rollmesh.planning.cluster import Cluster
from rollmesh.planning.placement import node_counts, spread
from rollmesh.planning.plan import Plan, micro_batch
from rollmesh.planning.settings import with_settings
from rollmesh.planning.switches import Planner

_LARGEST_BUDGET = 1 << 18
_TOKENS = "learner.batch.tokens_per_micro_batch"


@dataclass(frozen=True, slots=True)
class Proposal:
    """A layout that fits: FSDP2 over all of its ranks (full shard).

    Attributes:
        ranks: of the learner.
        settings: the keys that make it, those alone that the configuration has otherwise.
        rank_bytes: peak of a rank.
        left: devices that the learner leaves to generators.
        nodes: over which they are divided.
    """

    ranks: int
    settings: dict[str, Any]
    rank_bytes: int
    left: int
    nodes: int


@dataclass(frozen=True, slots=True)
class Search:
    """The result of a search for layouts.

    Attributes:
        proposal: the smallest number of ranks (`learner.parallel.sp` times a power of two) that fit a micro-batch of
            the longest sequence. It comes with its largest budget; None: none fits.
        largest_budget: of the configured layout; None: none fits.
        obstacles: without a proposal, what does not fit at the layout that comes nearest, in words.
    """

    proposal: Proposal | None
    largest_budget: int | None
    obstacles: tuple[str, ...] = ()


def propose(config: Config, cluster: Cluster, planner: Planner) -> Search:
    """Looks for layouts.

    Args:
        config: of the run.
        cluster: its devices.
        planner: plans another configuration on the same devices.
    """
    configured = _largest_budget(config, {}, planner)
    proposal = _smallest(config, cluster, planner, {})
    if proposal is not None:
        return Search(proposal, configured)
    nearest = _nearest(config, cluster, planner)
    if nearest is None:
        sp = config.learner.parallel.sp
        return Search(None, configured, (f"learner.parallel.sp is {sp}, and there are {cluster.count} device(s)",))
    if not any(use.problem for use in nearest.devices):
        for fewer in _fewer_on_hosts(config):
            if (proposal := _smallest(config, cluster, planner, fewer)) is not None:
                return Search(proposal, configured)
    layout = f"{nearest.placement.ranks} rank(s) on {nearest.placement.learner_nodes} node(s)"
    return Search(None, configured, tuple(f"{layout}: {problem}" for problem in nearest.problems))


def _smallest(config: Config, cluster: Cluster, planner: Planner, more: dict[str, Any]) -> Proposal | None:
    """The smallest layout that fits, with other keys in addition."""
    for ranks in _rank_counts(config, cluster):
        for nodes in node_counts(cluster, ranks):
            settings = more | _full_shard(config, ranks, nodes)
            tokens = _largest_budget(config, settings, planner)
            if tokens is not None:
                settings[_TOKENS] = tokens
                peak = _alone(config, settings, planner).learner_peak
                return Proposal(ranks, settings, peak, cluster.count - ranks, nodes)
    return None


def _nearest(config: Config, cluster: Cluster, planner: Planner) -> Plan | None:
    """The layout that fits its devices and takes the least of its hosts, although it does not fit; else the widest.

    None: no number of ranks can be divided over the devices.
    """
    plans = [
        _alone(config, _full_shard(config, ranks, nodes) | {_TOKENS: config.rollout.context_tokens}, planner)
        for ranks in _rank_counts(config, cluster)
        for nodes in node_counts(cluster, ranks)
    ]
    roomy = [plan for plan in plans if not any(use.problem for use in plan.devices)]
    return min(roomy or plans[-1:], key=lambda plan: sum(plan.host.values()), default=None)


def _fewer_on_hosts(config: Config) -> Iterator[dict[str, Any]]:
    """Keys with which versions take less of a host, one more each time."""
    weights = config.weights
    keys: dict[str, Any] = {}
    for key, value, applies in (
        ("model.dtype", "bfloat16", config.model.dtype == "float32"),
        ("weights.chain", 1, weights.encoding != "full" and weights.chain > 1),
        ("weights.keep_versions", 1, weights.keep_versions > 1),
    ):
        if applies:
            keys = keys | {key: value}
            yield keys


def _rank_counts(config: Config, cluster: Cluster) -> Iterator[int]:
    """Numbers of ranks that the configured division of sequences divides."""
    sp = config.learner.parallel.sp
    return (power * sp for power in _powers(cluster.count // sp))


def _full_shard(config: Config, ranks: int, nodes: int) -> dict[str, Any]:
    learner = config.learner
    settings = spread(config, ranks, nodes)
    if learner.parallel.shards is not None:
        settings["learner.parallel.shards"] = None
    if learner.devices is not None:
        settings["learner.devices"] = None
    return settings


def _largest_budget(config: Config, settings: dict[str, Any], planner: Planner) -> int | None:
    """The largest power of two, or the longest sequence, that fits ranks with devices of their own."""
    best = None
    longest = config.rollout.context_tokens
    for tokens in sorted({longest, *(size for size in _powers(_LARGEST_BUDGET) if size > longest)}):
        tried = settings | {_TOKENS: tokens}
        if not _alone(config, tried, planner).has_room:
            return best
        best = tokens
        if micro_batch(with_settings(config, tried))[0] < tokens:
            # A rank's whole part of a step is smaller.
            return best
    return best


def _alone(config: Config, settings: dict[str, Any], planner: Planner) -> Plan:
    return planner(with_settings(config, settings | {"rollout.replicas": 0}))


def _powers(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2
